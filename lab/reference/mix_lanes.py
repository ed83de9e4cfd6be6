"""The texts that are mixed (`lab.reference.mix`), each in a lane of its own: the
specification of kernels/cpp/mix.cpp.

A lane knows its tokens, the form of the chat that they are, and where its last tokens were seen
before, in any lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from towerd.kernels.mixing import BREAK, MATCH_MAX, MATCHES, OPENING

MATCH_ORDERS, MATCH_LEAST = (5,), 2
SALTS = (3, 5, 7)
PAD = 16
_64 = (1 << 64) - 1

U8 = npt.NDArray[np.uint8]


def mixed_hash(value: int, more: int) -> int:
    """One step of the chained hash."""
    value = (value ^ more) * 0x9E3779B97F4A7C15 & _64
    value ^= value >> 29
    return value * 0xBF58476D1CE4E5B9 & _64


def context_hash(history: Sequence[int], order: int) -> int:
    """The hash of the last `order` ranks, latest first."""
    value = 0
    for back in range(1, order + 1):
        value = mixed_hash(value, history[-back] + 1)
    return value


@dataclass
class RepeatedText:
    """Tokens of a lane that were equal to the last ones, up to `at`."""

    lane: int = 0
    at: int = 0
    length: int = 0


@dataclass
class Lane:
    """One text."""

    history: list[int] = field(default_factory=lambda: [0] * PAD)
    matches: list[RepeatedText] = field(
        default_factory=lambda: [RepeatedText() for _ in range(MATCHES)]
    )
    name: int = 0
    """Hash of the name of this message's author."""
    previous: int = 0
    """The same for the message before."""
    letters: int = 0
    """Hash of the part of the name that has been read."""
    in_name: bool = False
    line: int = 0
    """The first token of this line, plus 1."""
    place: int = 0
    """Number of tokens of the message so far."""

    def append(self, rank: int, kinds: U8) -> None:
        """Append a token and track the form of the chat."""
        kind, after_break = kinds[rank], kinds[self.history[-1]] == BREAK
        self.history.append(rank)
        if kind == OPENING:
            self.in_name, self.letters, self.previous, self.place = True, 0, self.name, 0
        elif not self.in_name:
            self.place += 1
            if self.place == 1 or after_break:
                self.line = rank + 1
        elif kind == BREAK:
            self.in_name, self.name, self.place, self.line = False, self.letters, 0, 0
        else:
            self.letters = mixed_hash(self.letters, rank + 1)

    def contexts(self) -> list[int]:
        """Hashes of the `DYNAMIC` contexts."""
        last = self.history[-1]
        orders = [context_hash(self.history, i + 1) * SALTS[i] & _64 for i in range(3)]
        turn = mixed_hash(self.previous ^ 13, 2 * min(self.place, 6) + int(self.in_name))
        line = mixed_hash(self.line + 9, last + (min(self.place, 3) << 20))
        return [*orders, 9999, mixed_hash(self.name ^ 5, last), line, turn]


class MixLanes:
    """`kinds` uint8[n]: PLAIN, BREAK or OPENING for each rank."""

    def __init__(self, kinds: U8) -> None:
        self._kinds = kinds
        self.reset(1)

    def __getitem__(self, lane: int) -> Lane:
        return self._lanes[lane]

    def reset(self, n: int) -> None:
        """Start `n` empty texts."""
        self._lanes = [Lane() for _ in range(n)]
        self._last_seen: list[dict[int, tuple[int, int]]] = [{} for _ in range(MATCHES)]

    def follows(self, match: RepeatedText) -> int:
        """The rank that followed the matched text; -1: another lane may not have got there yet."""
        past = self._lanes[match.lane].history
        return past[match.at] if match.length and match.at < len(past) else -1

    def append(self, lane: int, rank: int) -> None:
        """Append a token to a text."""
        for match in self._lanes[lane].matches:
            held = self.follows(match) == rank
            match.length = match.length + 1 if held else 0
            match.at += int(held)
        self._lanes[lane].append(rank, self._kinds)
        for i in range(MATCHES):
            self._find_match(lane, i)

    def _find_match(self, lane: int, which: int) -> None:
        """Find where the last tokens were seen before, if MATCH_LEAST of them really are equal."""
        here = self._lanes[lane]
        end = len(here.history)
        key = context_hash(here.history, MATCH_ORDERS[which]) >> 48
        if here.matches[which].length == 0 and key in self._last_seen[which]:
            other, at = self._last_seen[which][key]
            past, n = self._lanes[other].history, 0
            while (
                n < min(MATCH_MAX, at - PAD, end - PAD)
                and past[at - 1 - n] == here.history[end - 1 - n]
            ):
                n += 1
            if n >= MATCH_LEAST:
                here.matches[which] = RepeatedText(other, at, n)
        self._last_seen[which][key] = (lane, end)
