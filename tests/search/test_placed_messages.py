"""Conversations as messages: their parts, and where they begin in the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from rendered_chats import RENDERED, tokenized

from towerd.media_ids import spans_of
from towerd.search.chat import ChatPart, PlacedMessage, placed_messages

THOUGHT = {
    "chatml": "‹<|im_start|>›user\nWho?‹<|im_end|>›\n‹<|im_start|>›assistant\n<think>\nHm.\n</think>\n\nMe."
    '<tool_call>\n{"name": "f"}\n</tool_call>‹<|im_end|>›\n',
    "harmony": "‹<|start|>›user‹<|message|>›Who?‹<|end|>›‹<|start|>›assistant‹<|channel|>›analysis‹<|message|>›Hm."
    "‹<|end|>›‹<|start|>›assistant‹<|channel|>›final‹<|message|>›Me.‹<|return|>›",
    "magistral": "‹<s>›‹[INST]›Who?‹[/INST]›‹[THINK]›Hm.‹[/THINK]›Me.‹[TOOL_CALLS]›f{}‹</s>›",
}


def said(message: PlacedMessage) -> str:
    return "".join(part.text for part in message.parts if part.kind == "text")


@pytest.mark.parametrize("family", RENDERED)
def test_messages_begin_at_their_control_tokens(family: str) -> None:
    ids, vocabulary = tokenized(RENDERED[family])
    found = placed_messages(ids, vocabulary)
    assert [(each.role, said(each)) for each in found if each.role != "system"] == [
        ("user", "Who?"),
        ("assistant", "Me."),
    ]
    for each, after in zip(found, [*(m.at for m in found[1:]), len(ids)], strict=True):
        assert vocabulary.names[ids[each.at]]
        assert said(each) in vocabulary.text(ids[each.at : after])


@pytest.mark.parametrize("family", THOUGHT)
def test_what_was_thought_is_told_from_what_was_said(family: str) -> None:
    user, model = placed_messages(*tokenized(THOUGHT[family]))
    assert user.parts == [ChatPart("text", "Who?")]
    assert model.parts[:2] == [ChatPart("reasoning", "Hm."), ChatPart("text", "Me.")]
    calls = [part.text for part in model.parts[2:] if part.kind == "call"]
    assert calls == {"chatml": ['{"name": "f"}'], "harmony": [], "magistral": ["f{}"]}[family]


def test_reasoning_that_was_cut_off() -> None:
    (message,) = placed_messages(*tokenized("‹<|im_start|>›assistant\n<think>\nHm, so"))
    assert message.parts == [ChatPart("reasoning", "Hm, so")]


def test_media_stand_where_they_were() -> None:
    """Two beside each other are two."""
    ids, vocabulary = tokenized("‹<|im_start|>›user\nLook: ‹<|im_end|>›\n")
    first = -(1 << 30) - 5
    pictures = np.array([first, -7, -8, first - 1, -9], np.int32)
    ids = np.concatenate([ids[:-2], pictures, ids[-2:]])
    assert len(spans_of(ids)) == 2
    (message,) = placed_messages(ids, vocabulary)
    assert [part.kind for part in message.parts] == ["text", "medium", "medium"]


def test_speakers_by_turns_where_no_token_names_them() -> None:
    """A text that looks like a mark of ChatML is none of those."""
    ids, vocabulary = tokenized("<|im_start|>user\nWho?Me.And?You.")
    ends = [len("<|im_start|>user\nWho?"), len("<|im_start|>user\nWho?Me.")]
    ends += [ends[1] + 4, ends[1] + 8]
    found = placed_messages(ids, vocabulary, ends)
    assert [(each.role, said(each), each.at) for each in found] == [
        ("user", "Who?", 0),
        ("assistant", "Me.", ends[0]),
        ("user", "And?", ends[1]),
        ("assistant", "You.", ends[2]),
    ]
    (whole,) = placed_messages(ids, vocabulary)
    assert whole.role == ""
