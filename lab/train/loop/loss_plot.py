"""The plot of a run: loss, and bits per byte of the evaluation text, against tokens seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab.train.loop.run import History


def plot(history: History, path: Path, title: str) -> None:
    """Write a PNG to `path`."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left: Any = figure.subplots()
    left.plot(*_series(history, "loss"), color="tab:blue")
    left.set_xlabel("million tokens seen")
    left.set_ylabel("training loss, nats per token", color="tab:blue")
    right = left.twinx()
    right.plot(*_series(history, "dev"), "o-", color="tab:orange", markersize=3)
    right.set_ylabel("evaluation, bits per byte", color="tab:orange")
    left.set_title(title)
    part = path.with_name(f".{path.stem}.part.png")
    figure.savefig(part, dpi=120)
    os.replace(part, path)


def _series(history: History, key: str) -> tuple[list[float], list[float]]:
    rows = [row for row in history if row.get(key) and row["tokens"]]
    return [row["tokens"] / 1e6 for row in rows], [row[key] for row in rows]
