"""Divergence: why a prompt was not found whole, though much of it is stored.

A prefix cache ends at the first token that differs from a stored tower. Where the tower has what follows
in the prompt, too, a change in between cost the evaluation of what was known:

    tower   [ system prompt, Nov 25 | tools | messages ... ]
    prompt  [ system prompt, Nov 26 | tools | messages ... | new ]
                                 at  <---- n_known ------>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from towerd.model.speakers import MessageStart, message_starts
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids, common_prefix, run_hashes

Kind: TypeAlias = Literal["changed", "gone", "inserted"]
"""What is at the divergence: other text, nothing of some messages, messages that were not there."""

GRAM = 16
"""Two texts share a run of at least so many tokens; templates alone repeat shorter ones."""
KNOWN_MIN = 64
"""Fewer tokens are not worth words."""
COMPARED_MAX = 1 << 15
"""Tokens of either side that are compared behind the divergence."""
SHOWN_TOKENS = 48
BEFORE_CHARS = 60
AFTER_CHARS = 120
WORDS_CHARS = 32
_ALIGNED_MAX = 2048
_MESSAGE_TOKENS = 64
"""Two messages are the same if at least so many tokens from where they begin are."""
_LAST_WORDS = re.compile(r"(?:\S{1,12}[ \t]+)?\S{0,16}\Z")
_WORD_END = re.compile(r"\w{0,16}")


@dataclass(frozen=True, slots=True)
class Texts:
    """The text around a divergence."""

    before: str
    """The end of what both have."""
    old: str
    """How the tower goes on."""
    new: str
    """How the prompt goes on."""
    changed: tuple[str, str]
    """The words that differ, in the tower and in the prompt; empty if the text is the same in other
    tokens."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves the tower that has more of it than was found."""

    at: int
    """The first token that differs, counted from 0."""
    n_known: int
    """Tokens of the prompt that were evaluated or moved and are in the tower, behind the divergence."""
    kind: Kind
    role: str
    """The speaker of the prompt's message there; "" if it is not known."""
    message: int
    """The number of that message in the prompt, counted from 1; 0 if the prompt has no messages."""
    n_messages: int
    n_moved: int
    """How many messages are gone, or were inserted."""
    session: str
    """The session that the tower belongs to; "" for a base."""
    base: str
    """The base that the tower is; "" for a session."""
    texts: Texts

    @property
    def place(self) -> tuple[str, str]:
        """What diverges, the same for all requests that do so for one reason."""
        return self.kind, self.role

    def phrase(self, *, with_text: bool) -> str:
        """It in one line; with_text: with the words that differ."""
        if self.kind == "gone":
            return self._gone()
        if self.kind == "inserted":
            last = self.message + self.n_moved - 1
            return (
                f"{_numbers(self.message, last)} of {self.n_messages} inserted at token {self.at}"
            )
        where = "prompt"
        if self.role == "system" and self.message == 1:
            where = "system prompt"
        elif self.message:
            where = f"message {self.message} of {self.n_messages} ({self.role})"
        said = f"{where} changed at token {self.at}"
        if not with_text:
            return said
        old, new = self.texts.changed
        return f"{said}: {old!r} -> {new!r}" if old != new else f"{said}: same text, other tokens"

    def _gone(self) -> str:
        last = self.message + self.n_moved - 1
        are = "is" if self.n_moved == 1 else "are"
        said = f"{_numbers(self.message, last)} {are} no longer there"
        return f"the oldest turns are gone: {said}" if self.message <= 2 else said

    @property
    def advice(self) -> str:
        """What the client could do so that all of it is found."""
        match self.kind, self.role:
            case "gone", _:
                return (
                    "It drops its oldest turns: give it a larger context, or let it drop many at once "
                    "and seldom, since each time all that follows has to be evaluated."
                )
            case "inserted", _:
                return (
                    "It inserts messages before what was said: put them at the end of the prompt, or "
                    "into the last message."
                )
            case _, "system":
                return (
                    "Its system prompt changes between requests (a date, a folder, a list): put what "
                    "changes at the end of the prompt or into the last message, and all before it is "
                    "found."
                )
            case _, "assistant":
                return (
                    "It sends answers back otherwise than they were generated: let it send them "
                    "whole, with their reasoning if the template takes it."
                )
            case _:
                return (
                    "It changes what it sent before: let it send earlier messages as they were, and "
                    "put what changes at the end of the prompt."
                )


def _numbers(first: int, last: int) -> str:
    return f"message {first}" if first == last else f"messages {first} to {last}"


# ---- what of a prompt is in a tower --------------------------------------------------------------


def n_known(prompt: Ids, tower: Ids, start: int, at: int) -> int:
    """How many tokens of the prompt from `start` on are in runs of GRAM or more that the tower has
    from `at` on, wherever."""
    mine, theirs = (
        run_hashes(ids[n : n + COMPARED_MAX], GRAM) for ids, n in ((prompt, start), (tower, at))
    )
    hits = np.flatnonzero(np.isin(mine, theirs))
    covered = np.zeros(len(mine) + GRAM, bool)
    for k in range(GRAM):
        covered[hits + k] = True
    return int(np.count_nonzero(covered))


def diverge(
    prompt: Ids,
    tower: Ids,
    n_known: int,
    vocabulary: KeptVocabulary,
    *,
    session: str = "",
    base: str = "",
) -> Divergence:
    """How a prompt leaves a tower, of which it is no continuation; n_known: see there."""
    at = common_prefix(prompt, tower)
    mine, theirs = message_starts(prompt, vocabulary), message_starts(tower, vocabulary)
    place = sum(start.at <= at for start in mine)
    kind, n_moved = _moved(prompt, tower, mine, theirs, place - 1) if place else ("changed", 0)
    role = mine[place - 1].role if place else ""
    texts = _texts(prompt, tower, at, vocabulary)
    return Divergence(
        at, n_known, kind, role, place, len(mine), n_moved, session, base, texts
    )  # fmt: skip


def _moved(
    prompt: Ids, tower: Ids, mine: Sequence[MessageStart], theirs: Sequence[MessageStart], i: int
) -> tuple[Kind, int]:
    """Whether the prompt's message `i` is a later one of the tower, or the tower's a later one of the
    prompt, and how many stood before it."""
    if (k := _later(prompt, mine, i, tower, theirs)) is not None:
        return "gone", k - i
    if i < len(theirs) and (k := _later(tower, theirs, i, prompt, mine)) is not None:
        return "inserted", k - i
    return "changed", 0


def _later(
    ids: Ids, starts: Sequence[MessageStart], i: int, others: Ids, places: Sequence[MessageStart]
) -> int | None:
    """Which message of the others behind their message `i` is message `i` of the ids. Short ones are
    compared with what follows them."""
    end = starts[i + 1].at if i + 1 < len(starts) else 0
    said = ids[starts[i].at : max(end, starts[i].at + _MESSAGE_TOKENS)]
    for k in range(i + 1, len(places)):
        other = others[places[k].at : places[k].at + len(said)]
        if len(other) >= GRAM and np.array_equal(said[: len(other)], other):
            return k
    return None


# ---- the text on both sides ----------------------------------------------------------------------


def _texts(prompt: Ids, tower: Ids, at: int, vocabulary: KeptVocabulary) -> Texts:
    before = vocabulary.spell(prompt[max(0, at - SHOWN_TOKENS) : at])
    both, ends = (tower, prompt), _changed_ends(tower, prompt, at)
    sides = [before + vocabulary.spell(ids[at : at + SHOWN_TOKENS]) for ids in both]
    cut = _cut(*sides)
    shared = sides[0][:cut].decode("utf-8", "replace").lstrip("\ufffd")
    old, new = (side[cut:].decode("utf-8", "replace").rstrip("\ufffd") for side in sides)
    changed = ("", "")
    if cut < min(map(len, sides)):
        stops = (
            len(before) + len(vocabulary.spell(ids[at:end]))
            for ids, end in zip(both, ends, strict=True)
        )
        n_old, n_new = (
            len(side[cut:stop].decode("utf-8", "ignore"))
            for side, stop in zip(sides, stops, strict=True)
        )
        changed = _words(shared, old, n_old), _words(shared, new, n_new)
    return Texts(shared[-BEFORE_CHARS:], old[:AFTER_CHARS], new[:AFTER_CHARS], changed)


def _changed_ends(a: Ids, b: Ids, at: int) -> tuple[int, int]:
    """Where two texts, which differ from `at` on, agree again."""
    grams, others = (run_hashes(ids[at : at + _ALIGNED_MAX], GRAM) for ids in (a, b))
    hits = np.isin(others, grams)
    if not hits.any():
        return at + SHOWN_TOKENS, at + SHOWN_TOKENS
    first = int(hits.argmax())
    end, other_end = at + int((grams == others[first]).argmax()), at + first
    while min(end, other_end) > at and a[end - 1] == b[other_end - 1]:
        end, other_end = end - 1, other_end - 1
    return end, other_end


def _cut(a: bytes, b: bytes) -> int:
    """The number of bytes that two texts share, whole characters alone."""
    n = common_prefix(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))
    while n and any(text[n : n + 1] and text[n] & 0xC0 == 0x80 for text in (a, b)):
        n -= 1
    return n


def _words(before: str, after: str, n: int) -> str:
    """The words of which the first `n` characters of `after` are a part, and the word before them."""
    end = _WORD_END.match(after, n)
    lead = _LAST_WORDS.search(before.rpartition("\n")[2])
    words = " ".join(((lead[0] if lead else "") + after[: end.end() if end else n]).split())
    return words if len(words) <= WORDS_CHARS else words[: WORDS_CHARS - 1].rstrip() + "…"
