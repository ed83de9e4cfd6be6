"""The plot of `towerctl lab bench policy`: hit rate over time and against capacity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.plot import new_figure
from lab.replay.compare import Cell
from lab.replay.trace import Trace

_WINDOWS = 60


def plot(path: Path, shown: dict[str, tuple[Trace, Sequence[Cell]]]) -> None:
    """A row per trace: over time at the capacity where LRU loses most, and against capacity."""
    figure = new_figure(11, 4.0 * len(shown))
    axes = figure.subplots(len(shown), 2, squeeze=False)
    for (left, right), (title, (trace, cells)) in zip(axes, shown.items(), strict=True):
        cell = max(cells, key=lambda c: c.outcomes["belady"].hit_rate - c.outcomes["lru"].hit_rate)
        _over_time(left, trace, cell, title)
        _against_capacity(right, cells, title)
    figure.savefig(path)


def _over_time(axes: Any, trace: Trace, cell: Cell, title: str) -> None:
    parts = np.array_split(np.arange(len(trace.calls)), min(_WINDOWS, len(trace.calls)))
    tokens = np.array([call.n_tokens for call in trace.calls])
    hours = [trace.calls[int(part[-1])].time_s / 3600 for part in parts]
    for name, outcome in cell.outcomes.items():
        hits = np.minimum(tokens, np.array(outcome.hits) * trace.block_tokens)
        axes.plot(
            hours, [100 * hits[part].sum() / tokens[part].sum() for part in parts], label=name
        )
    axes.set_title(f"{title}, {100 * cell.capacity:g} % of the blocks")
    axes.set_xlabel("hours")
    axes.set_ylabel("hit rate, %")
    axes.legend()


def _against_capacity(axes: Any, cells: Sequence[Cell], title: str) -> None:
    for name in cells[0].outcomes:
        rates = [100 * cell.outcomes[name].hit_rate for cell in cells]
        axes.plot([100 * cell.capacity for cell in cells], rates, marker="o", label=name)
    axes.set_xscale("log")
    axes.set_title(title)
    axes.set_xlabel("capacity, % of the blocks")
    axes.set_ylabel("hit rate, %")
    axes.legend()
