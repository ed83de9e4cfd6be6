"""The part of `towerctl bench policy` about agent workflows: hit rates with hints, and how often
predictors are right."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from towerd.cli.output import show_table
from towerd.cli.train_predictor import scores
from towerd.policy.predict.runs import Run, split
from towerd.replay.cells import Source
from towerd.replay.runs import read_runs

POLICIES = ("pbkv", "kvflow", "latem")
MAIN = "who_and_when"
"""The data set with several agents; the others have one model and its tools."""
_USERS = 24
_EPOCHS = 25
_HELD_OUT = 0.3


def files(folder: Path) -> list[Path]:
    """The workflow files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if ".jsonl" in path.suffixes)


def main_source(folder: Path, segment_tokens: int) -> Source | None:
    """The multi-agent workflows expanded to prompts, as 24 users; None: they are not there."""
    for path in files(folder):
        if path.name.startswith(MAIN):
            return Source(path, segment_tokens, _USERS)
    return None


def predictors(folder: Path, *, quick: bool) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """(data set, accuracy of each predictor) on held-out tasks. The graph model is trained only
    where torch is, and not when it must be quick."""
    trains = not quick and importlib.util.find_spec("torch") is not None
    for path in files(folder):
        learned, held = split(read_runs(path), _HELD_OUT, 0)
        weights: Any = None
        if trains:
            from towerd.policy.predict.train import train

            weights = train(learned, epochs=_EPOCHS)
        yield path.name.split(".")[0], scores(learned, held, weights)


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """One row per data set and predictor."""
    rows = [
        (data, name, *(f"{row[key]:.3f}" for key in ("s1", "s2", "s3", "calibration_error")))
        for data, table in found.items()
        for name, row in table.items()
    ]
    heads = ("workflows", "predictor", ">1 step", ">2 steps", ">3 steps", ">calibration error")
    show_table(heads, rows)


def figures(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """s1, s2, s3: per data set what each predictor reaches."""
    return {
        key: {
            data: {name: round(row[key], 4) for name, row in table.items()}
            for data, table in found.items()
        }
        for key in ("s1", "s2", "s3")
    }


def paths_of(folder: Path) -> list[tuple[str, ...]]:
    """Steps of all runs of the smallest file."""
    smallest: list[Run] = read_runs(min(files(folder), key=lambda path: path.stat().st_size))
    return [run.steps for run in smallest]
