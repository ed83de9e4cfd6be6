"""Drift: how much approximate rows change a model's answers, compared with the noise floor.

Quantized weights amplify rounding: the same text in batches of another size gives other
distributions. That divergence is the model's noise floor, which a drift is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

DECODED = "decoded"
"""Stands for the format of native rows that were decoded from one that is not known any more."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A measured drift, in nats."""

    kl: float
    """Mean KL divergence of the next-token distribution from that over exact rows."""
    floor_kl: float = 0.0
    """The noise floor on the same tokens."""

    @property
    def excess(self) -> float:
        """What the approximation adds to the floor; negative only by chance."""
        return self.kl - self.floor_kl


class DecodedRun(NamedTuple):
    """Tokens [p0, p1) of a prompt whose rows were decoded from the stored format `format`."""

    p0: int
    p1: int
    format: str


def combined(drifts: Sequence[Drift]) -> Drift:
    """The drift of several approximations in one prompt: the floor, plus the excess of each."""
    floor_kl = max(drift.floor_kl for drift in drifts)
    return Drift(floor_kl + sum(max(0.0, drift.excess) for drift in drifts), floor_kl)
