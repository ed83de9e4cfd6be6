"""Moves: the runs of rows that are kept behind other text than they were computed after, for one prompt.

A run is kept in pieces. Before each piece a block of tokens is evaluated that the run has rows of, too:
its rows, computed behind the new text, are compared with those of the run. A piece may follow another
one without a block, where a long one is brought in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from towerd.slots.rows import KVRows
from towerd.store import RowsPart
from towerd.tiers.moved_limits import RunProfile
from towerd.tokens import Provenance, Provenances


@dataclass(frozen=True, slots=True)
class MovedRows:
    """The rows of one piece, at the positions of the prompt."""

    kept: KVRows
    block: KVRows | None
    """The run's own rows of the block before the piece; None if there is none."""
    is_hot: bool
    """All rows were in RAM."""


@dataclass(eq=False, slots=True)
class MovedPiece:
    """Tokens [p0, p1) of a prompt whose rows are those of another path."""

    run: int
    """Where its run begins in the prompt."""
    block: int
    """Where the block begins that is evaluated before it; `p0` if there is none."""
    p0: int
    p1: int
    delta: int
    """How far its rows move: `p0` less the index of the token that they were computed for."""
    place: int
    """llama.cpp's position of token `block`."""
    parts: tuple[RowsPart, ...]
    """The rows of [block, p1), where they are stored."""
    rows: Future[MovedRows | None] | None = None
    """Being composed; its result is None if they cannot be read."""
    is_hot: bool = False
    """See MovedRows; known once they are attached."""

    @property
    def n(self) -> int:
        """Tokens in it."""
        return self.p1 - self.p0


@dataclass(slots=True)
class Moves:
    """The pieces of one prompt, those to come in order of position."""

    pieces: list[MovedPiece]
    profiles: dict[int, RunProfile]
    """What was measured of each run, by where it begins."""
    attached: list[MovedPiece] = field(default_factory=list)
    """Those that are live."""
    n_checked: int = 0
    """Tokens of blocks that were evaluated."""
    n_refused: int = 0
    """Tokens of runs that were found and then evaluated, because a block deviated."""

    @property
    def p0(self) -> int | None:
        """Where the next piece begins; up to there the prompt is evaluated."""
        return self.pieces[0].p0 if self.pieces else None

    @property
    def provenance(self) -> Provenances:
        """uint8[n]: the provenance of the next piece's rows."""
        return np.full(self.pieces[0].n, Provenance.MOVED, np.uint8)

    @property
    def measured(self) -> list[RunProfile]:
        """What was measured of each run that has a block by now."""
        return [each for each in self.profiles.values() if each.deviations]

    def attach(self, rows: MovedRows) -> MovedPiece:
        """Note that the next piece is live now; returns it."""
        piece = self.pieces.pop(0)
        piece.is_hot, piece.rows, piece.parts = rows.is_hot, None, ()
        self.attached.append(piece)
        return piece

    def refuse(self, allows: Callable[[RunProfile], bool]) -> list[MovedPiece]:
        """Cut the run of the next piece, whose block deviates or whose rows are gone. Returns the pieces
        that are live and must not stay so, the last one first: those between this block and the one
        before it, and more until `allows` says that what is left may be kept."""
        run = self.pieces[0].run
        profile, n = self.profiles[run], sum(each.n for each in self.cut(run))
        profile.is_cut = True
        dropped = self.drop_stretch(run)
        while self._has(run) and not allows(profile):
            profile.deviations.pop()
            dropped += self.drop_stretch(run)
        self.n_refused += n + sum(each.n for each in dropped)
        if self._has(run):
            profile.n = self.attached[-1].p1 - run
        else:
            del self.profiles[run]
        return dropped

    def drop_stretch(self, run: int) -> list[MovedPiece]:
        """Take the pieces of a run behind its last block out of `attached`; returns them, the last one
        first."""
        dropped: list[MovedPiece] = []
        while self._has(run):
            dropped.append(self.attached.pop())
            if dropped[-1].block < dropped[-1].p0:
                break
        return dropped

    def drop_unchecked(self) -> list[MovedPiece]:
        """Take the pieces out of `attached` that a block still to come would have told of: no more are
        brought. Returns them, the last one first."""
        dropped = self.drop_stretch(self.pieces[0].run) if self.pieces else []
        self.abandon()
        return dropped

    def _has(self, run: int) -> bool:
        return bool(self.attached) and self.attached[-1].run == run

    def cut(self, run: int) -> list[MovedPiece]:
        """Evaluate the rest of a run instead; returns its pieces that were to come."""
        gone = [piece for piece in self.pieces if piece.run == run]
        self.pieces = [piece for piece in self.pieces if piece.run != run]
        for piece in gone:
            if piece.rows is not None:
                piece.rows.cancel()
        return gone

    def abandon(self) -> None:
        """Bring no more pieces."""
        for piece in self.pieces:
            if piece.rows is not None:
                piece.rows.cancel()
        self.pieces = []
