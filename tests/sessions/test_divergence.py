"""How a prompt leaves a stored tower: where, in which message, and the words on both sides."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from towerd.model.speakers import MessageStart, message_starts, system_tokens
from towerd.sessions.divergence import GRAM, KNOWN_MIN, Divergence, diverge, n_known
from towerd.sessions.habits import CLIENTS_MAX, Habits
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids

CONTROLS = ("<|im_start|>", "<|im_end|>")
VOCABULARY = KeptVocabulary(
    [*(bytes([i]) for i in range(256)), b"", b""],
    [b""] * 256 + [each.encode() for each in CONTROLS],
)
"""Every byte, and ChatML's control tokens."""
Message = tuple[str, str]
TOOLS = "You may call these tools: " + ", ".join(f"tool_{n} does thing {n}" for n in range(12))


def ids_of(text: str) -> Ids:
    ids: list[int] = []
    for part in re.split(r"(<\|im_\w+\|>)", text):
        ids += [256 + CONTROLS.index(part)] if part in CONTROLS else part.encode()
    return np.array(ids, np.int32)


def rendered(messages: Sequence[Message], *, asks: bool = True) -> Ids:
    """A prompt in ChatML. asks: it ends with what begins a reply."""
    said = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return ids_of("".join(said) + "<|im_start|>assistant\n" * asks)


def chat(system: str, n: int = 6) -> list[Message]:
    """A system prompt and `n` messages of 80 characters and more."""
    said = [(("user", "assistant")[k % 2], f"What number {k} says. " * 4) for k in range(n)]
    return [("system", system), *said]


def found(old: Sequence[Message], new: Sequence[Message]) -> Divergence | None:
    """The divergence of a prompt from a stored conversation; None if nothing behind it is known."""
    tower, prompt = rendered(old, asks=False), rendered(new)
    at = next(k for k, (a, b) in enumerate(zip(tower, prompt, strict=False)) if a != b)
    n = n_known(prompt, tower, at, at)
    return diverge(prompt, tower, n, VOCABULARY, session="s") if n >= KNOWN_MIN else None


def phrase(old: Sequence[Message], new: Sequence[Message]) -> str:
    divergence = found(old, new)
    return "" if divergence is None else divergence.phrase(with_text=True)


def test_a_date_in_the_system_prompt() -> None:
    old, new = chat(f"Today is Nov 25, 2025. {TOOLS}"), chat(f"Today is Nov 26, 2025. {TOOLS}")
    new.append(("user", "And now?"))
    divergence = found(old, new)
    assert divergence is not None
    assert (
        divergence.phrase(with_text=True)
        == "system prompt changed at token 22: 'Nov 25' -> 'Nov 26'"
    )
    assert divergence.phrase(with_text=False) == "system prompt changed at token 22"
    assert divergence.texts.before.endswith("Today is Nov 2")
    assert divergence.texts.old.startswith("5, 2025. You may")
    assert divergence.texts.new.startswith("6, 2025. You may")
    assert len(rendered(old)) - 40 < divergence.n_known < len(rendered(old))
    assert "put what changes at the end" in divergence.advice


def test_a_tool_list_that_grew() -> None:
    old = chat(TOOLS)
    new = chat(TOOLS.replace("tool_5", "tool_x does nothing, tool_5"))
    assert phrase(old, new).startswith("system prompt changed at token")
    assert phrase(old, new).endswith("'4, tool_5' -> '4, tool_x does nothing, tool_5'")


@pytest.mark.parametrize(
    ("n", "said"),
    [(1, "message 2 is no longer there"), (4, "messages 2 to 5 are no longer there")],
)
def test_the_oldest_turns_dropped(n: int, said: str) -> None:
    """Though what comes instead begins with the same words."""
    old = chat("Be brief.")
    new = [old[0], *old[1 + n :], ("user", "And now?")]
    assert phrase(old, new) == f"the oldest turns are gone: {said}"
    later = [*old[:4], *old[5:], ("user", "And now?")]
    assert phrase(old, later) == "message 5 is no longer there"


def test_messages_put_in_between() -> None:
    old = chat("Be brief.")
    reminder = ("user", "Remember to use the tools that you have, and to be brief about it.")
    new = [*old[:3], reminder, *old[3:]]
    assert re.fullmatch(r"message 4 of 8 inserted at token \d+", phrase(old, new))
    new = [*old[:3], reminder, ("assistant", "Yes, I shall remember."), *old[3:]]
    assert re.fullmatch(r"messages 4 to 5 of 9 inserted at token \d+", phrase(old, new))


def test_a_message_edited_in_the_middle() -> None:
    old = chat("Be brief.")
    new = [*old[:3], ("user", "What number 2 thinks. " + "What number 2 says. " * 3), *old[4:]]
    assert re.fullmatch(
        r"message 4 of 7 \(user\) changed at token \d+: '2 says' -> '2 thinks'", phrase(old, new)
    )


def test_what_is_no_change() -> None:
    """A regenerated answer, another branch, a new chat: nothing behind it is known."""
    old = chat(TOOLS)
    assert phrase(old, [*old[:-1], ("assistant", "Quite another answer.")]) == ""
    assert phrase(old, [*old[:3], ("user", "Something else entirely, please, about whales.")]) == ""
    assert phrase(old, [old[0], ("user", "A question that was never asked before.")]) == ""


def test_an_answer_sent_back_otherwise() -> None:
    thought = ("assistant", "<think>Hm, let me see.</think>" + "So says the model. " * 6)
    old = [*chat("Be brief.", 1), thought]
    new = [*chat("Be brief.", 1), ("assistant", "So says the model. " * 6), ("user", "And?")]
    divergence = found(old, new)
    assert divergence is not None
    assert divergence.place == ("changed", "assistant")
    assert divergence.texts.changed[0].startswith("<think>Hm, let me see.</think>"[:20])


def test_a_prompt_without_messages() -> None:
    tower, prompt = (ids_of(f"The year is {year}. {TOOLS}") for year in (2025, 2031))
    divergence = diverge(prompt, tower, 300, VOCABULARY)
    assert divergence.message == divergence.n_messages == 0
    assert divergence.phrase(with_text=True) == "prompt changed at token 14: 'is 2025' -> 'is 2031'"


def test_characters_and_media_are_shown_whole() -> None:
    """Ids of media are no text, and a character of several tokens is not cut."""
    tower, prompt = (ids_of(f"Es war ein {word} Tag. {TOOLS}") for word in ("schöner", "schäner"))
    texts = diverge(prompt, tower, 300, VOCABULARY).texts
    assert texts.before == "Es war ein sch"
    assert texts.changed == ("ein schöner", "ein schäner")
    pictured = np.concatenate([prompt[:11], np.full(40, -3, np.int32), prompt[11:]])
    texts = diverge(pictured, prompt, 300, VOCABULARY).texts
    assert texts.new.startswith("<__media__>")


def test_the_same_text_in_other_tokens() -> None:
    pieces = [*VOCABULARY.pieces, b"th"]
    vocabulary = KeptVocabulary(pieces, [*VOCABULARY.names, b""])
    tower = ids_of(f"Say the word. {TOOLS}")
    prompt = np.concatenate([tower[:4], np.array([258], np.int32), tower[6:]])
    said = diverge(prompt, tower, 300, vocabulary).phrase(with_text=True)
    assert said == "prompt changed at token 4: same text, other tokens"


def test_what_is_known_is_counted_in_runs() -> None:
    ids = np.arange(1000, dtype=np.int32)
    other = np.concatenate([ids[500:], ids[100 : 100 + GRAM - 1], ids[200 : 200 + GRAM]])
    assert n_known(ids, other, 0, 0) == 500 + GRAM
    assert n_known(ids, other, 990, 0) == 0, "shorter than a run"
    assert n_known(ids[:GRAM], ids[: GRAM - 1], 0, 0) == 0


def test_where_messages_begin() -> None:
    """The reply that is to come is none."""
    ids = rendered([("system", "a"), ("user", "b"), ("assistant", "c" * 20)])
    starts = message_starts(ids, VOCABULARY)
    assert [each.role for each in starts] == ["system", "user", "assistant"]
    assert all(ids[each.at] == 256 for each in starts)
    assert message_starts(rendered([("user", "b")]), VOCABULARY) == [MessageStart("user", 0)]
    assert message_starts(ids_of("No chat."), VOCABULARY) == []


def test_a_habit_is_told_once() -> None:
    habits = Habits()
    told = [habits.note("c", place) for place in ("a", None, "a", "a", None, "a", "a", "a", "b")]
    assert told == [False] * 6 + [True, False, False]
    assert not any(habits.note(n, "a") for n in range(2 * CLIENTS_MAX))
    assert not any(habits.note("new", place) for place in ("a", "b") * 8), "half of them, not most"


@pytest.mark.parametrize("n_system", [30, 9000])
def test_system_tokens_are_what_prompts_with_one_system_prompt_share(n_system: int) -> None:
    system = "Be brief. " * (n_system // 10)
    prompts = [rendered([("system", system), ("user", said)]) for said in ("yes", "no")]
    shared = next(k for k, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert [system_tokens(ids, VOCABULARY) for ids in prompts] == [shared, shared]
    assert system_tokens(rendered([("user", "hello")]), VOCABULARY) == 0
    assert system_tokens(rendered([("system", system)]), VOCABULARY) == 0
    assert system_tokens(ids_of("no template at all"), VOCABULARY) == 0


@pytest.mark.parametrize(
    ("form", "n_behind"),
    [("<|{role}|>\n{text}<|end|>\n", 1), ("<|start|>{role}<|message|>{text}<|end|>", 3)],
)
def test_system_tokens_end_with_the_name_of_the_first_speaker(form: str, n_behind: int) -> None:
    """Names in control tokens (Phi, Zephyr), and between two of them (gpt-oss)."""
    controls = ("<|system|>", "<|user|>", "<|start|>", "<|message|>", "<|end|>")
    vocabulary = KeptVocabulary(
        [*(bytes([i]) for i in range(256)), *(b"" for _ in controls)],
        [b""] * 256 + [each.encode() for each in controls],
    )
    said = form.format(role="user", text="user\nsays")
    text = form.format(role="system", text="Be brief.") + said
    ids: list[int] = []
    for part in re.split(r"(<\|\w+\|>)", text):
        ids += [256 + controls.index(part)] if part in controls else part.encode()
    n_said = len(re.sub(r"<\|\w+\|>", ".", said))
    named = n_behind + (len("user") - 1 if n_behind > 1 else 0)
    assert system_tokens(np.array(ids, np.int32), vocabulary) == len(ids) - n_said + named
