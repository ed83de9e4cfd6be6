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


def folds(runs: Sequence[Run], n: int, seed: int) -> list[int]:
    """Of each run the one of `n` parts in which it is held out; whole groups, as equal as they
    come. With less than `n` groups, every run stands for itself."""
    groups = groups_of(runs, n)
    names = sorted(set(groups))
    random.Random(seed).shuffle(names)
    part = {name: i % n for i, name in enumerate(names)}
    return [part[name] for name in groups]


def groups_of(runs: Sequence[Run], least: int) -> list[str]:
    """The group of each run; each its own when there are fewer than `least`."""
    found = [_group(run, i) for i, run in enumerate(runs)]
    return found if len(set(found)) >= least else [f"run {i}" for i in range(len(runs))]


def _group(run: Run, number: int) -> str:
    return run.group or f"run {number}"
