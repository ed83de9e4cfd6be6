"""The pieces of modules that are spliced into one job's sequence, with the blobs of their rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from towerd.engine.embedded.context.context import Buffer
from towerd.tiers.modules import PlacedModule
from towerd.tokens import Provenance, Provenances


@dataclass(frozen=True, slots=True)
class Blobs:
    """The sequence blobs of the runs of one placed module, by position."""

    by_start: dict[int, Buffer]
    is_hot: bool
    """All rows were in RAM."""


@dataclass(frozen=True, slots=True)
class SplicePiece:
    """Tokens [p0, p1) of a prompt whose rows a module has."""

    placed: PlacedModule
    p0: int
    p1: int
    blobs: Future[Blobs | None]

    @property
    def n(self) -> int:
        return self.p1 - self.p0

    @property
    def provenance(self) -> Provenances:
        """uint8[n]: the provenance of its rows."""
        return np.full(self.n, Provenance.SPLICED, np.uint8)

    def when_ready(self, tell: Callable[[Buffer | None], None]) -> None:
        """Call `tell` with the blob, or None if it cannot be read; on any thread, maybe at once."""

        def done(future: Future[Blobs | None]) -> None:
            blobs = None if future.cancelled() else future.result()
            tell(None if blobs is None else blobs.by_start[self.p0])

        self.blobs.add_done_callback(done)


@dataclass(slots=True)
class Splice:
    """The pieces that are still to be spliced into one job's sequence, in order."""

    pieces: list[SplicePiece] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)
    """First positions of the modules whose drift is in the job's reuse."""

    @property
    def p0(self) -> int | None:
        """Where the next piece begins; up to there the job evaluates."""
        return self.pieces[0].p0 if self.pieces else None

    def drop(self, placed: PlacedModule) -> None:
        """Evaluate this module instead."""
        self.pieces = [piece for piece in self.pieces if piece.placed is not placed]

    def abandon(self) -> None:
        """Cancel the remaining pieces."""
        for piece in self.pieces:
            piece.blobs.cancel()
        self.pieces = []
