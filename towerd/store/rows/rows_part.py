"""RowsPart: where the rows of a part of a segment are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from towerd.drift import DECODED, DecodedRun
from towerd.slots.layout import NATIVE
from towerd.slots.runs import Runs
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_header import FormatRun
from towerd.store.tree.node import Node
from towerd.tokens import Provenance, Provenances, provenance_as_kept

Tier: TypeAlias = Literal["hot", "warm"]


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Rows [p0, p1) of one node. It refers to their location, so a split or an eviction of
    the node after planning is harmless."""

    node: Node
    p0: int
    p1: int
    tier: Tier
    source: Runs | SegmentFile
    origin: Provenance = Provenance.EXACT
    """For hot rows: what they were computed as."""

    @property
    def provenance(self) -> Provenances:
        """That of each position, uint8[p1 - p0]."""
        if isinstance(self.source, SegmentFile):
            return self.source.provenance(self.p0, self.p1)
        provenance = np.full(self.p1 - self.p0, self.origin, np.uint8)
        for rows in self.source.slice(self.p0, self.p1):
            if not rows.layout.is_native:
                kept = provenance_as_kept(self.origin, is_native=False)
                provenance[rows.p0 - self.p0 : rows.p1 - self.p0] = kept
        return provenance

    @property
    def decoded(self) -> list[DecodedRun]:
        """Its rows that are decoded from stored formats, in order."""
        if isinstance(self.source, SegmentFile):
            at, runs = self.source.p0, self.source.runs
            found = [DecodedRun(at + run.row0, at + run.end, _decoded_from(run)) for run in runs]
        elif self.origin == Provenance.APPROXIMATE:  # decoded on their way into RAM
            file, whole = self.node.file, (self.p0, self.p1)
            at, runs = (0, ()) if file is None else (file.p0, file.runs)
            found = [DecodedRun(at + run.row0, at + run.end, _decoded_from(run)) for run in runs]
            found = found or [DecodedRun(*whole, DECODED)]
        else:
            kept = [(rows, rows.layout) for rows in self.source]
            found = [
                DecodedRun(rows.p0, rows.p1, NATIVE if each.is_native else each.format_name)
                for rows, each in kept
            ]
        cut = [DecodedRun(max(p0, self.p0), min(p1, self.p1), name) for p0, p1, name in found]
        return [run for run in cut if run.p0 < run.p1 and run.format != NATIVE]


def _decoded_from(run: FormatRun) -> str:
    return DECODED if run.format == NATIVE and run.is_decoded else run.format
