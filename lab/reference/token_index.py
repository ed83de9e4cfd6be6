"""Runs of tokens found anywhere, in Python: the specification of kernels/cpp/token_index.cpp.

An index that tells where in stored paths the tokens of a prompt occur. Of each SPAN consecutive
windows of WINDOW tokens one is sampled by its content ("Winnowing: Local Algorithms for Document
Fingerprinting", Schleimer, Wilkerson and Aiken, 2003), so two texts that share WINDOW + SPAN - 1
tokens sample a window that they share:

- A window's hash is a polynomial of its tokens' random words. The window of a span with the lowest
  hash is sampled, the last of equal ones: those WINDOW + SPAN - 1 tokens alone determine it.
- Windows that repeat with a period of at most PERIOD_MAX are sampled only in spans without another
  one. There the sampled window stays until it leaves the span, so that a long repetition gives one
  sample for SPAN tokens. Any stretch of it agrees with any other.
- Windows begin anew behind a negative id, which is no token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.reference.sums import WORD
from towerd.tokens import ids_array

WINDOW = 32
SPAN = 33
CONTEXT = WINDOW + SPAN - 1
PERIOD_MAX = 16
PLACES_MAX = 4
_BASE = 0x9E3779B97F4A7C15

Added = tuple[int, int, int, int, int, bytes, bytes]
"""(key, parent, owner, instead_of, first, context, ids) of the tokens `ids` from position `first` on,
which the node `owner` has: `context` are tokens before them, at least CONTEXT if there are so many;
`parent`: the owner of windows that end before `first`; `instead_of`: the node that had the tokens
before a split, or 0; `key`: separates scopes."""


def samples(ids: Sequence[int], seed: int) -> list[tuple[int, int]]:
    """(position after its last token, hash) of each sampled window, ascending."""
    found: list[tuple[int, int]] = []
    start = 0
    for stop in [*(i for i, id in enumerate(ids) if id < 0), len(ids)]:
        found += [(start + end, hash) for end, hash in _samples(ids[start:stop], seed)]
        start = stop + 1
    return found


def _samples(ids: Sequence[int], seed: int) -> Iterator[tuple[int, int]]:
    windows = [_Window(i, ids[i : i + WINDOW], seed) for i in range(len(ids) - WINDOW + 1)]
    sampled = None
    for i in range(len(windows) - SPAN + 1):
        span = windows[i : i + SPAN]
        lowest = min((window.is_periodic, window.hash >> 1) for window in span)
        best = [w for w in span if (w.is_periodic, w.hash >> 1) == lowest]
        if sampled not in best or not lowest[0]:
            before, sampled = sampled, best[-1]
            if sampled is not before:
                yield sampled.at + WINDOW, sampled.hash


class _Window:
    def __init__(self, at: int, ids: Sequence[int], seed: int) -> None:
        self.at = at
        total = 0
        for id in ids:
            total = (total * _BASE + _mixed((id + seed) & WORD)) & WORD
        self.hash = _mixed(total)
        periods = range(1, PERIOD_MAX + 1)
        self.is_periodic = any(list(ids[p:]) == list(ids[:-p]) for p in periods)


@dataclass(frozen=True)
class _Place:
    owner: int
    end: int


class ReferenceTokenIndex:
    """The sampled windows of nodes, each with at most PLACES_MAX places: the first one and the
    newest."""

    def __init__(self, seed: int) -> None:
        """seed: of 64 bits; who does not know it cannot tell which windows are sampled."""
        self._seed = seed
        self._places: dict[int, list[_Place]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def add(self, runs: Sequence[Added]) -> None:
        """Enter the windows that are sampled first in a span that ends in the run."""
        for key, parent, owner, instead_of, first, context, ids in runs:
            before = ids_array(context)[-CONTEXT:].tolist()
            known = set(samples(before, self._seed))
            for end, hash in samples([*before, *ids_array(ids).tolist()], self._seed):
                if (end, hash) not in known:
                    at = end + first - len(before)
                    self._put(hash ^ key, _Place(owner if at > first else parent, at), instead_of)

    def _put(self, window: int, place: _Place, instead_of: int) -> None:
        places = self._places.setdefault(window, [])
        before = _Place(instead_of, place.end)
        if place in places:
            return
        if before in places:
            places[places.index(before)] = place
        else:
            places.append(place)
            del places[1 : max(1, len(places) - PLACES_MAX + 1)]

    def find(
        self, keys: Sequence[int], ids: bytes, start: int, stop: int
    ) -> list[tuple[int, int, int]]:
        """(position after the window in the prompt, owner, position after it in the owner's path)
        of each known place of the windows sampled in ids[start:stop]: ascending, then in the order of
        the keys, newest first."""
        prompt = ids_array(ids)[start:stop].tolist()
        return [
            (start + end, place.owner, place.end)
            for end, hash in samples(prompt, self._seed)
            for key in keys
            for place in reversed(self._places.get(hash ^ key, []))
        ]

    def compact(self, live: Sequence[int]) -> None:
        """Forget the places of owners that are not in `live`, ascending."""
        for window, places in list(self._places.items()):
            self._places[window] = [place for place in places if place.owner in live]


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)
