"""The plot of `towerctl lab bench latem`: a panel per case, cost over optimum against wrong advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.bench.plot import new_figure
from lab.latem.cases import CASES
from lab.latem.curves import Point, robustness


def plot(path: Path, curves: Mapping[str, Sequence[Point]]) -> None:
    """Lines for every trust, plain marking, LRU, and Theorem 1's bounds, dotted."""
    figure = new_figure(5.0 * len(curves), 4.4)
    for axes, (name, points) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        _panel(axes, name, points)
    figure.savefig(path)


def _panel(axes: Any, name: str, points: Sequence[Point]) -> None:
    wrong = [point.error for point in points]
    for eps in points[0].repaired:
        axes.plot(wrong, [p.repaired[eps] for p in points], marker="o", label=f"eps {eps:g}")
    axes.plot(wrong, [p.adaptive for p in points], marker="s", label="adaptive")
    axes.plot(wrong, [p.marking for p in points], "k--", label="marking")
    axes.plot(wrong, [p.lru for p in points], "k-.", label="LRU")
    axes.plot(wrong, [p.consistency for p in points], "b:", label="consistency bound")
    bound = robustness(CASES[name], max(points[0].repaired))
    axes.axhline(bound, color="r", linestyle=":", label="robustness bound, largest eps")
    axes.set_yscale("log")
    axes.set_title(name)
    axes.set_xlabel("share of wrong advice")
    axes.set_ylabel("cost / optimum")
    axes.legend(fontsize="small")
