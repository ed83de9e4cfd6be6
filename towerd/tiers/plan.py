"""What the tiers and the live context hand each other: plans, blobs, gaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.store import APPROXIMATE, Node, RowsPart, Taint


@dataclass(frozen=True, slots=True)
class Plan:
    """Stored rows that continue a live prefix: `parts` are consecutive from token `start`."""

    start: int = 0
    parts: tuple[RowsPart, ...] = ()
    n_hot: int = 0
    n_warm: int = 0
    n_public: int = 0
    n_approximate: int = 0
    """Of these tokens, those whose rows are in a stored format."""

    @property
    def n(self) -> int:
        return self.n_hot + self.n_warm

    @classmethod
    def nothing(cls) -> Plan:
        return cls()


@dataclass(frozen=True, slots=True)
class Composed:
    """One sequence blob for the next `n` planned tokens, in a buffer to be recycled."""

    n: int
    n_hot: int
    n_warm: int
    blob: npt.NDArray[np.uint8]
    buffer: npt.NDArray[np.uint8]
    taint: Taint
    """uint8[n]: which of the tokens are EXACT, DERIVED or APPROXIMATE."""

    @property
    def n_approximate(self) -> int:
        """Tokens whose rows were decoded from a stored format."""
        return int(np.count_nonzero(self.taint == APPROXIMATE))


@dataclass(frozen=True, slots=True)
class Gap:
    """Recorded tokens [p0, p1) of one path whose rows the store lacks."""

    nodes: tuple[Node, ...]
    p0: int
    p1: int
