"""Plans, blobs and gaps: data exchanged between the tiers and the live context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from towerd.drift import DecodedRun
from towerd.slots.rows import HeadRows
from towerd.store import Node, RowsPart, SegmentFile
from towerd.store.rows.checkpoints import StateCheckpoint
from towerd.tokens import Provenance, Provenances, are_moved, count_approximate, count_unmoved


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Stored rows that continue a live prefix: `parts` are consecutive from token `start`."""

    start: int = 0
    parts: tuple[RowsPart, ...] = ()
    n_hot: int = 0
    n_warm: int = 0
    n_public: int = 0
    n_approximate: int = 0
    """Tokens among `parts` whose rows are in a stored format, were moved or computed from moved
    ones."""
    n_match: int = 0
    """Leading tokens of the prompt that are stored, with or without rows."""
    checkpoint: StateCheckpoint | None = None
    """The state to restore after the rows."""

    @property
    def n(self) -> int:
        return self.n_hot + self.n_warm

    @property
    def n_moved(self) -> int:
        """Tokens among `parts` whose rows were moved or computed from moved ones."""
        return sum(int(are_moved(part.provenance).sum()) for part in self.parts)

    @property
    def n_unmoved(self) -> int:
        """Leading tokens among `parts` before the first whose rows were moved or computed from moved
        ones."""
        n = 0
        for part in self.parts:
            n += count_unmoved(part.provenance)
            if n < part.p1 - self.start:
                break
        return n

    @property
    def decoded(self) -> list[DecodedRun]:
        """The rows among `parts` that are decoded from stored formats."""
        return [run for part in self.parts for run in part.decoded]

    @property
    def n_rows(self) -> int:
        """Tokens that come with rows: all, unless the model has none."""
        return sum(part.p1 - part.p0 for part in self.parts)

    def up_to(self, checkpoint: StateCheckpoint) -> RestorePlan:
        """This plan cut off at a checkpoint's position, to end with its state."""
        end = checkpoint.position
        parts = tuple(replace(p, p1=min(p.p1, end)) for p in self.parts if p.p0 < end)
        n_hot = sum(p.p1 - p.p0 for p in parts if p.tier == "hot")
        n_warm = sum(p.p1 - p.p0 for p in parts if p.tier == "warm")
        if not parts and checkpoint.data is not None:
            n_hot = end - self.start
        elif not parts:
            n_warm = end - self.start
        n_approximate = sum(count_approximate(p.provenance) for p in parts)
        return replace(
            self,
            parts=parts,
            n_hot=n_hot,
            n_warm=n_warm,
            n_approximate=n_approximate,
            checkpoint=checkpoint,
        )


NOTHING = RestorePlan()


@dataclass(frozen=True, slots=True)
class Composed:
    """One sequence blob for the next `n` planned tokens. `buffer`, if any, must be recycled."""

    n: int
    n_hot: int
    n_warm: int
    blob: npt.NDArray[np.uint8]
    buffer: npt.NDArray[np.uint8] | None
    provenance: Provenances
    """uint8[n]: that of each token; AFTER_MOVED for all rows that were stored as such."""
    decoded: Sequence[DecodedRun] = ()
    """Those that were decoded from stored formats."""
    head: HeadRows | None = None
    """What a head that drafts had of these tokens."""

    @property
    def n_approximate(self) -> int:
        """Tokens whose rows were decoded from a stored format, moved or computed from moved ones."""
        return count_approximate(self.provenance)


@dataclass(frozen=True, slots=True)
class Gap:
    """Recorded tokens [p0, p1) of one path whose rows the store lacks, or has worse ones of."""

    nodes: tuple[Node, ...]
    p0: int
    p1: int
    origin: Provenance = Provenance.EXACT
    """What the live rows are stored as, see `origin_of`."""


def merge_adjacent(parts: Iterable[RowsPart]) -> Iterator[RowsPart]:
    """Join neighbouring parts of one file, because a blob may belong to several nodes."""
    last: RowsPart | None = None
    for part in parts:
        in_file = isinstance(part.source, SegmentFile)
        if last is not None and in_file and last.source is part.source and last.p1 == part.p0:
            last = replace(part, p0=last.p0)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
