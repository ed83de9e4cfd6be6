"""StoredDrift: what rows that are decoded from stored formats cost a prompt, by how much of it has which.

A table is measured on prompts of which each level's format has its share, from the start. A prompt may
have other shares: nearly all of it is what many share, or one chat's own. Its cost follows from the
formats of the rows that it was given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.drift import DECODED, DecodedRun, Drift
from towerd.slots.layout import NATIVE
from towerd.store.segments.coded_format import is_coded
from towerd.tiers.formats.calibration import BOUNDS, SHARES, Calibration, bound_of
from towerd.tiers.shrink import TAIL


@dataclass(frozen=True, slots=True)
class StoredDrift:
    """The excess of every measured format, and how it is spread over a prompt."""

    floor_kl: float
    excess: Mapping[str, float]
    """Format -> excess of a prompt whose rows are all in it, in nats; not too low at 95 %."""
    weights: Sequence[float]
    """What each level's part of a prompt has in that: SHARES are their lengths."""
    bound: float
    """The excess that a prompt may have."""
    tail_factor: float = 1.0
    """What rows cost that are in a stored format up to the end of a prompt, over those of a prompt whose
    last TAIL are native."""

    def of(
        self,
        is_decoded: npt.NDArray[np.bool_],
        live: Sequence[DecodedRun],
        coming: Sequence[DecodedRun],
        n_prompt: int,
    ) -> Drift | None:
        """The drift of a prompt of `n_prompt` tokens; None if the cost of a format is not known.

        is_decoded: bool[n], which of its live rows were decoded from stored formats
        live: what they were decoded from, the last to name a token counts; what none names is in the
            most expensive format
        coming: what comes behind them"""
        cost = np.zeros(max(n_prompt, len(is_decoded)))
        known = np.full(len(cost), max(self.excess.values(), default=math.nan))
        self._fill(known, live)
        cost[: len(is_decoded)][is_decoded] = known[: len(is_decoded)][is_decoded]
        self._fill(cost, coming)
        total = float((cost * self._density(n_prompt, len(cost))).sum())
        return None if math.isnan(total) else Drift(self.floor_kl + total, self.floor_kl)

    def n_within(self, coming: Sequence[DecodedRun], n_prompt: int) -> int:
        """How many leading tokens of a prompt may come from the store if all else of it is exact, so
        that its excess stays within the bound. Formats whose cost is not known count nothing."""
        cost = np.zeros(n_prompt)
        self._fill(cost, coming)
        sums = np.cumsum(np.nan_to_num(cost) * self._density(n_prompt, n_prompt))
        # Rounding must not cut a prompt that is stored as it was measured.
        return int(np.searchsorted(sums, self.bound * (1 + 1e-6), "right"))

    def _fill(self, cost: npt.NDArray[np.float64], runs: Sequence[DecodedRun]) -> None:
        most = max(self.excess.values(), default=math.nan)
        for run in runs:
            unknown = most if run.format == DECODED else math.nan
            cost[run.p0 : run.p1] = self.excess.get(run.format, unknown)

    def _density(self, n_prompt: int, n: int) -> npt.NDArray[np.float64]:
        """float64[n]: what each token of a prompt of `n_prompt` has of the cost of one whose rows are all in
        one format but for the last TAIL; these have what it costs beyond that."""
        ends = np.concatenate([[0.0], np.cumsum(SHARES)])
        sums = np.concatenate([[0.0], np.cumsum(self.weights)])
        found: npt.NDArray[np.float64]
        found = np.diff(np.interp(np.arange(n + 1) / n_prompt, ends, sums))
        first = max(0, n_prompt - TAIL)
        found[first:n_prompt] += (self.tail_factor - 1) / (n_prompt - first)
        return found


def stored_drift(
    found: Calibration, fidelity: str, squeezed: Mapping[str, Drift], is_squeezed: bool
) -> StoredDrift:
    """What calibration found, so that the table of `fidelity` on the prompts that it was measured on
    costs the upper end of its interval.

    squeezed: the drift of what was ever squeezed or transform-coded, by format; is_squeezed: some rows are
    squeezed, so that prompts may cost what the bound of `small` allows"""
    choice, uniform = found.choices[fidelity], found.grid.uniform
    means = {name: max(0.0, cost.excess) for name, cost in uniform.items()}
    of_table = sum(
        weight * means.get(name, 0.0)
        for weight, name in zip(found.grid.weights, choice.levels, strict=True)
    )
    excess = {}
    for name, cost in uniform.items():
        excess[name] = max(0.0, cost.excess_max)
        if name in choice.levels and means[name] > 0:
            excess[name] = means[name] * choice.cost.excess_max / of_table
    stored = [name for name in choice.levels if name != NATIVE]
    factor = 1.0
    if choice.whole is not None and excess.get(stored[-1], 0.0) > 0:
        factor = max(1.0, choice.whole.excess_max / excess[stored[-1]])
    bound = bound_of(fidelity, found.floor.kl)
    if is_squeezed:
        bound = max(bound, BOUNDS["small"])
    for name, drift in squeezed.items():
        if is_squeezed or is_coded(name):
            excess[name] = max(excess.get(name, 0.0), drift.excess)
    return StoredDrift(choice.cost.floor_kl, excess, found.grid.weights, bound, factor)
