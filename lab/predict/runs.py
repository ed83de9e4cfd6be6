"""Whole workflows, on which predictors are trained and evaluated."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.steps import N_ORDERS, N_TEXT, NONE, StepFeatures, Steps, Vector, step


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished workflow. steps: names; meanings: for each step float32 [N_TEXT], the text known
    before it and its own, or an empty list; group: equal for runs of one task."""

    steps: tuple[str, ...]
    meanings: tuple[Vector, ...] = ()
    group: str = ""


def split(
    runs: Sequence[FinishedRun], share: float, seed: int
) -> tuple[list[FinishedRun], list[FinishedRun]]:
    """(the rest, about `share` of the groups) in whole groups; neither part is empty if there are
    two runs or more."""
    groups = sorted({_group(run, i) for i, run in enumerate(runs)})
    random.Random(seed).shuffle(groups)
    held = set(groups[: max(1, round(share * len(groups)))])
    mask = [_group(run, i) in held for i, run in enumerate(runs)]
    if all(mask):
        mask = [i % 2 == 1 for i in range(len(runs))]
    rest = [run for run, is_held in zip(runs, mask, strict=True) if not is_held]
    return rest, [run for run, is_held in zip(runs, mask, strict=True) if is_held]


def folds(runs: Sequence[FinishedRun], n: int, seed: int) -> list[int]:
    """For each run, which of `n` parts holds it out; groups stay whole, and parts are as equal as
    possible. With fewer than `n` groups, every run is a group of its own."""
    groups = groups_of(runs, n)
    names = sorted(set(groups))
    random.Random(seed).shuffle(names)
    part = {name: i % n for i, name in enumerate(names)}
    return [part[name] for name in groups]


def groups_of(runs: Sequence[FinishedRun], least: int) -> list[str]:
    """The group of each run; each run is its own group if there are fewer than `least` groups."""
    found = [_group(run, i) for i, run in enumerate(runs)]
    return found if len(set(found)) >= least else [f"run {i}" for i in range(len(runs))]


def _group(run: FinishedRun, number: int) -> str:
    return run.group or f"run {number}"


def remember(runs: Sequence[FinishedRun], numbers: Mapping[str, int], end: int) -> Steps:
    """All steps of `runs`. numbers: the number of each name in them; end: the number of END."""
    found: list[StepFeatures] = []
    outcomes: list[list[int]] = []
    for run in runs:
        codes = [*(numbers[name] for name in run.steps), end] + [NONE] * N_STEPS
        for i in range(len(run.steps)):
            found.append(step(run.steps[: i + 1], run.meanings[: i + 1]))
            outcomes.append(codes[i + 1 : i + 1 + N_STEPS])
    said = np.array([each.said for each in found], np.float16)  # as in a file
    talk = np.array([each.talk for each in found], np.float16)
    return Steps(
        np.array([each.keys for each in found], np.uint64).reshape(-1, N_ORDERS),
        said.astype(np.float32).reshape(-1, N_TEXT),
        talk.astype(np.float32).reshape(-1, N_TEXT),
        np.array(outcomes, np.int32).reshape(-1, N_STEPS),
    )
