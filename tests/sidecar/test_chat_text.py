"""Continued chats are recognised by their messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from towerd.engine.llama_server.slots.chat_text import MESSAGES_MAX, chat_text_of

TEXTS = st.sampled_from(["", "a", " a\n", "b"])
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS | st.none()}
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=5)},
    optional={"tools": st.integers(0, 1), "seed": st.integers(0, 1)},
)


def continues(before: dict[str, Any], reply: str, after: dict[str, Any]) -> bool:
    """Whether it does, by the requests themselves."""
    n = len(before["messages"])
    said = after["messages"]
    if before.get("tools") != after.get("tools"):
        return False
    if said[:n] != before["messages"] or len(said) < n + 2:
        return False
    return bool(said[n]["role"] == "assistant" and (said[n]["content"] or "").strip() == reply)


@given(BODIES, TEXTS, st.lists(MESSAGES, max_size=3), BODIES)
def test_what_goes_on(
    before: dict[str, Any], reply: str, more: list[dict[str, Any]], other: dict[str, Any]
) -> None:
    """A request continues another if it begins with all of it and its reply, and differs in
    nothing else that may change the prompt."""
    text = chat_text_of(before)
    assert text is not None
    answered = text.answered(reply)
    said = [*before["messages"], {"role": "assistant", "content": reply}, *more]
    for after in ({**before, "messages": said}, {**other, "messages": said}, other):
        found = chat_text_of(after)
        assert found is not None
        assert found.continues(answered) == continues(before, reply.strip(), after)
        texts = [message["content"] or "" for message in after["messages"]]
        assert found.bytes_after(0) >= sum(len(text.encode()) for text in texts)
        assert found.bytes_after(len(after["messages"])) == 0


def test_texts_in_parts() -> None:
    """A client may send a reply back as it likes."""
    begun: list[Any] = [{"role": "user", "content": "hi"}]
    text = chat_text_of({"messages": begun})
    assert text is not None
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    for content in ("hello", "hello\n", parts):
        said = [*begun, {"role": "assistant", "content": content}, *begun]
        again = chat_text_of({"messages": said})
        assert again is not None
        assert again.continues(text.answered("hello"))


def test_no_ordinary_chats() -> None:
    strange: list[Any] = [
        None,
        "hi",
        ["hi"],
        [{"role": "user"}] * (MESSAGES_MAX + 1),
        [{"a": np.zeros(3)}],
    ]
    for messages in strange:
        assert chat_text_of({"messages": messages}) is None
    assert chat_text_of({"messages": []}) is not None
