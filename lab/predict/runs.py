"""Whole workflows, as predictors learn from them and are judged by them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.features import N_TEXT, Vector
from towerd.policy.predict.steps import N_ORDERS, NONE, Step, Steps, step


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


def remember(runs: Sequence[Run], numbers: Mapping[str, int], end: int) -> Steps:
    """All steps of `runs`; numbers: of the names that occur in them; end: that of END."""
    found: list[Step] = []
    outcomes: list[list[int]] = []
    for run in runs:
        codes = [*(numbers[name] for name in run.steps), end] + [NONE] * N_STEPS
        for i in range(len(run.steps)):
            found.append(step(run.steps[: i + 1], run.meanings[: i + 1]))
            outcomes.append(codes[i + 1 : i + 1 + N_STEPS])
    said = np.array([each.said for each in found], np.float16)  # as a file keeps them
    talk = np.array([each.talk for each in found], np.float16)
    return Steps(
        np.array([each.keys for each in found], np.uint64).reshape(-1, N_ORDERS),
        said.astype(np.float32).reshape(-1, N_TEXT),
        talk.astype(np.float32).reshape(-1, N_TEXT),
        np.array(outcomes, np.int32).reshape(-1, N_STEPS),
    )
