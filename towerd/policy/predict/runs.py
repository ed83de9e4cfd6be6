"""Whole workflows, as predictors learn from them and are judged by them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from towerd.policy.predict.features import Vector


@dataclass(frozen=True, slots=True)
class Run:
    """A workflow that ended. steps: names; meanings: float32 [N_TEXT] each, what was known when
    the step was taken and what it said, or none at all; group: runs of one task."""

    steps: tuple[str, ...]
    meanings: tuple[Vector, ...] = ()
    group: str = ""


def split(runs: Sequence[Run], share: float, seed: int) -> tuple[list[Run], list[Run]]:
    """(the rest, about `share` of the groups), whole groups, never none on either side of two
    runs or more."""
    groups = sorted({_group(run, i) for i, run in enumerate(runs)})
    random.Random(seed).shuffle(groups)
    held = set(groups[: max(1, round(share * len(groups)))])
    mask = [_group(run, i) in held for i, run in enumerate(runs)]
    if all(mask):
        mask = [i % 2 == 1 for i in range(len(runs))]
    rest = [run for run, is_held in zip(runs, mask, strict=True) if not is_held]
    return rest, [run for run, is_held in zip(runs, mask, strict=True) if is_held]


def _group(run: Run, number: int) -> str:
    return run.group or f"run {number}"
