"""A trace as the replayer sees it: a tree of segments, and requests along its paths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from towerd.errors import TowerdError
from towerd.policy import Key


class TraceError(TowerdError):
    """A trace that cannot be used; the message names the file, the record and the field."""

    status = 400
    kind = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class Call:
    """One request. Times in seconds, lengths in tokens.

    path: the segments of its input from the root on; session: calls with equal numbers follow
    each other; stop: why the answer ended ("" unknown); service_s: how long the answer took;
    agent: the name of the agent ("" unknown); n_base: leading tokens that its prompts begin with
    whatever it is told (0 unknown); ends: segments that no request continues after
    this one is answered, nor their descendants."""

    time_s: float
    path: tuple[int, ...]
    n_tokens: int
    session: int
    stop: str = ""
    service_s: float = 0.0
    agent: str = ""
    ends: tuple[int, ...] = ()
    n_base: int = 0


@dataclass(slots=True)
class Trace:
    """Requests in order of time over a tree of segments: the Tree of the policies that it is
    replayed with.

    A segment is a run of blocks that every request uses as a whole; parents[s] is the segment
    before s (-1: none), and n_blocks[s] the length of s in blocks of `block_tokens` tokens."""

    name: str
    block_tokens: int
    parents: list[int]
    n_blocks: list[int]
    calls: list[Call] = field(default_factory=list)
    is_woven: bool = True
    """False: every session begins at time 0, see `interleave`."""
    _children: dict[int, list[int]] | None = field(default=None, init=False, repr=False)
    """Built when a policy asks first."""

    def parent(self, key: Key) -> Key | None:
        """See Tree.parent."""
        above = self.parents[key]
        return above if above >= 0 else None

    def children(self, key: Key) -> Iterable[Key]:
        """See Tree.children."""
        if self._children is None:
            self._children = {}
            for segment in range(len(self.parents) - 1, -1, -1):
                self._children.setdefault(self.parents[segment], []).append(segment)
        return self._children.get(key, ())

    @property
    def n_distinct_blocks(self) -> int:
        """Blocks that an unlimited cache would hold in the end."""
        return sum(self.n_blocks)

    def base(self, call: Call) -> Key | None:
        """The last segment that a call's base covers; None: it covers none."""
        base, n_left = None, call.n_base // self.block_tokens
        for segment in call.path:
            n_left -= self.n_blocks[segment]
            if n_left < 0:
                break
            base = segment
        return base

    def depths(self) -> list[int]:
        """Blocks from the root to the end of each segment."""
        depths: list[int] = []
        for parent, length in zip(self.parents, self.n_blocks, strict=True):
            depths.append(length + (depths[parent] if parent >= 0 else 0))
        return depths

    @property
    def n_input_tokens(self) -> int:
        return sum(call.n_tokens for call in self.calls)
