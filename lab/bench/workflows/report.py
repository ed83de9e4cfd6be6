"""Figures of workflows, over seeds, with the intervals that a bootstrap over seeds and workflows gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, TypeAlias

import numpy as np

from lab.bench.workflows.client import ServedWorkflow

Statistic: TypeAlias = Callable[[Sequence[float]], float]
_RESAMPLES = 1000
_LOW, _HIGH = 0.025, 0.975


@dataclass(slots=True)
class CellOutcome:
    """One run of a cell. busy: share of the time in which a request waited or was served; moved_bytes:
    between disk, RAM and the live context; prefetched, prefetched_used: bytes; costs: of the daemon's decisions, by kind."""

    workflows: list[ServedWorkflow]
    busy: float
    moved_bytes: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    costs: dict[str, list[float]] = field(default_factory=dict)

    @property
    def measured(self) -> list[ServedWorkflow]:
        """Those behind the warm-up."""
        return [each for each in self.workflows if each.is_measured]


def figures(outcomes: Sequence[CellOutcome]) -> dict[str, float]:
    """Of one cell, over its seeds. Times in seconds."""
    measured = [workflow for outcome in outcomes for workflow in outcome.measured]
    steps = [step for workflow in measured for step in workflow.steps]
    ttft_s = [step.ttft_s for step in steps]
    known = [step.base_missed for step in steps if step.base_missed is not None]
    return {
        "ttft_mean_s": mean(ttft_s),
        "ttft_p50_s": float(np.median(ttft_s)),
        "ttft_p90_s": float(np.quantile(ttft_s, 0.9)),
        "step_s": mean(step.total_s for step in steps),
        "completion_s": mean(workflow.completion_s for workflow in measured),
        "hit_rate": 1 - sum(s.n_evaluated for s in steps) / sum(s.n_prompt for s in steps),
        "evaluated_p50": float(np.median([step.n_evaluated for step in steps])),
        "evaluated_mean": mean(step.n_evaluated for step in steps),
        "base_miss": mean(known),
        "moved_mb": mean(outcome.moved_bytes for outcome in outcomes) / 1e6,
        "prefetched": sum(outcome.prefetched for outcome in outcomes),
        "prefetched_used": sum(outcome.prefetched_used for outcome in outcomes),
        "busy": mean(outcome.busy for outcome in outcomes),
    }


def costs(outcomes: Sequence[CellOutcome]) -> dict[str, float]:
    """CPU time of a decision, mean and 99th percentile, by the names of PBKV's Table 4."""
    found: dict[str, float] = {}
    for name in sorted({name for outcome in outcomes for name in outcome.costs}):
        each = [x for outcome in outcomes for x in outcome.costs.get(name, ())]
        if each:
            found[f"{name}_mean"] = mean(each)
            found[f"{name}_p99"] = float(np.quantile(each, 0.99))
    return found


def ratio(
    over: Sequence[CellOutcome], under: Sequence[CellOutcome], of: Statistic
) -> tuple[float, float, float]:
    """`of` the times to first token in `over`, over those in `under`, with its interval of 95 %. Both ran
    the same workflows with the same seeds; a resample takes the same seeds and workflows of both."""
    pairs = [
        list(zip(a.measured, b.measured, strict=True)) for a, b in zip(over, under, strict=True)
    ]
    rng = np.random.default_rng(0)
    found = []
    for _ in range(_RESAMPLES):
        drawn = []
        for at in rng.integers(0, len(pairs), len(pairs)):
            drawn += [pairs[at][i] for i in rng.integers(0, len(pairs[at]), len(pairs[at]))]
        found.append(_ratio(drawn, of))
    whole = _ratio([pair for each in pairs for pair in each], of)
    return whole, float(np.quantile(found, _LOW)), float(np.quantile(found, _HIGH))


def _ratio(pairs: Sequence[tuple[ServedWorkflow, ServedWorkflow]], of: Statistic) -> float:
    over, under = ([s.ttft_s for w in side for s in w.steps] for side in zip(*pairs, strict=True))
    return of(over) / of(under)


def table(
    cells: Mapping[str, Mapping[str, float]],
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Heads and rows for people: a row a cell."""
    heads = (
        "cell",
        ">TTFT p50",
        ">mean",
        ">p90",
        ">step",
        ">workflow",
        ">hit",
        ">base miss",
        ">MB",
        ">busy",
    )
    rows = [
        (
            name,
            *(f"{row[key]:.3f}" for key in ("ttft_p50_s", "ttft_mean_s", "ttft_p90_s", "step_s")),
            f"{row['completion_s']:.1f}",
            f"{100 * row['hit_rate']:.1f} %",
            f"{100 * row['base_miss']:.1f} %",
            f"{row['moved_mb']:.0f}",
            f"{100 * row['busy']:.0f} %",
        )
        for name, row in cells.items()
    ]
    return heads, rows
