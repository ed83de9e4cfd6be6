"""Places: the position that llama.cpp gives each token of a sequence.

In the store and in the pool a token is counted by its index. In a model with M-RoPE the tokens of a
picture of w x h share one position, and the text behind it continues max(w, h) positions later:

    token      0 1 2 3 4 5 6 7 8 9        a picture of 3 x 2 is tokens 2 to 7
    place      0 1 2 2 2 2 2 2 5 6

The ids alone say so (see `towerd.media_ids`), so places are never stored.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from towerd.media_ids import is_first, n_places, spans_of
from towerd.tokens import Ids


@dataclass(slots=True)
class _Shared:
    """A medium whose tokens [start, end) share a place."""

    start: int
    end: int
    place: int
    n_places: int


class Places:
    """The places of a sequence's tokens, in order; as long as no medium is added, each is at its
    index. What is added, cut or asked costs time in proportion to itself, not to the sequence."""

    __slots__ = ("_starts", "_shared")

    def __init__(self, ids: Ids | None = None) -> None:
        """ids: the first tokens of the sequence of a model with M-RoPE; None: there are none"""
        self._shared: list[_Shared] = []
        self._starts: list[int] = []
        """That of each of `_shared`."""
        if ids is not None:
            self.extend(ids, 0)

    def extend(self, ids: Ids, n: int) -> None:
        """Add `ids` behind the first `n` tokens; they may begin or end within a medium."""
        for start, end in spans_of(ids):
            last = self._shared[-1] if self._shared else None
            first = int(ids[start])
            places = n_places(first)
            if places is not None:
                place = self.of(n + start)
                self._starts.append(n + start)
                self._shared.append(_Shared(n + start, n + end, place, places))
            elif last is not None and last.end == n + start and not is_first(first):
                last.end = n + end

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens."""
        while self._shared and self._shared[-1].start >= n:
            self._shared.pop()
            self._starts.pop()
        if self._shared:
            self._shared[-1].end = min(self._shared[-1].end, n)

    def fork(self, n: int) -> Places:
        """The places of the first `n` tokens, for a branch."""
        branch = Places()
        m = bisect_left(self._starts, n)
        branch._starts = self._starts[:m]
        branch._shared = [_Shared(s.start, s.end, s.place, s.n_places) for s in self._shared[:m]]
        branch.truncate(n)
        return branch

    def of(self, n: int) -> int:
        """The place of token `n`, which must not be within a medium."""
        m = bisect_left(self._starts, n)
        if m == 0:
            return n
        last = self._shared[m - 1]
        assert n >= last.end, "no token within a medium has a place of its own"
        return last.place + last.n_places + n - last.end

    def whole(self, p0: int, p1: int) -> tuple[int, int]:
        """[p0, p1), extended to whole media."""
        first, last = bisect_left(self._starts, p0), bisect_left(self._starts, p1)
        if first and self._shared[first - 1].end > p0:
            p0 = self._shared[first - 1].start
        if last and self._shared[last - 1].end > p1:
            p1 = self._shared[last - 1].end
        return p0, p1

    def between(self, p0: int, p1: int) -> Ids | None:
        """int32[p1 - p0], the places of tokens [p0, p1); None if each is at its index."""
        m = bisect_right(self._starts, p0)
        if m == 0 and bisect_left(self._starts, p1) == 0:
            return None
        if m and self._shared[m - 1].end > p0:
            m -= 1
        places, at = np.empty(p1 - p0, np.int32), p0
        while at < p1:
            shared = self._shared[m] if m < len(self._shared) else None
            if shared is not None and shared.start <= at:
                end = min(shared.end, p1)
                places[at - p0 : end - p0] = shared.place
                m += 1
            else:
                end = p1 if shared is None else min(shared.start, p1)
                first = self.of(at)
                places[at - p0 : end - p0] = np.arange(first, first + end - at, dtype=np.int32)
            at = end
        return places
