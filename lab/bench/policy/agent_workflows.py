"""The part of `towerctl lab bench policy` about agent workflows: hit rates with hints, and how often
predictors are right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.bench.policy.recognition import recognition
from lab.predict.accuracy import ForecastScores, concatenate
from lab.predict.baselines import HEADS, MIXTURE, Row, as_text, score_all, table
from lab.predict.runs import FinishedRun, folds
from lab.replay.cells import TraceSource
from lab.replay.runs import read_runs
from towerd.cli.output import show_table

if TYPE_CHECKING:
    from towerd.policy.predict.mixture import MixtureWeights

POLICIES = ("pbkv", "kvflow", "latem")
MAIN = "who_and_when"
"""The data set with several agents; the others have one model with its tools."""
_USERS = 24
_EPOCHS = 25
_PARTS = 5
_STEPS = ("s1", "s2", "s3")
_SURE = 0.85


def files(folder: Path) -> list[Path]:
    """The workflow files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if ".jsonl" in path.suffixes)


def main_source(folder: Path, segment_tokens: int) -> TraceSource | None:
    """The multi-agent workflows expanded to prompts, as 24 users; None: they are not there."""
    for path in files(folder):
        if path.name.startswith(MAIN):
            return TraceSource(path, segment_tokens, _USERS)
    return None


def predictors(folder: Path, *, quick: bool, jobs: int = 1) -> Iterator[tuple[str, dict[str, Row]]]:
    """(data set, accuracy of each predictor), every task held out once, in `jobs` processes.
    The mixture is trained only if torch is installed and not `quick`. `quick` also holds out only
    one part of the tasks."""
    trains = not quick and importlib.util.find_spec("torch") is not None
    paths = files(folder)
    held_out = range(1 if quick else _PARTS)
    tasks = [(path, part, trains) for path in paths for part in held_out]
    with _pool(jobs) as work:
        found = work(_score_part, tasks)
        for path in paths:
            parts = [next(found) for _ in held_out]
            scored = {name: concatenate([part[name] for part in parts]) for name in parts[0]}
            yield path.name.split(".")[0], table(scored)


def _score_part(task: tuple[Path, int, bool]) -> dict[str, ForecastScores]:
    """Train all predictors on all parts but one, and score them on that part."""
    path, part, trains = task
    runs = _read(path)
    of = folds(runs, _PARTS, 0)
    learned = [run for run, p in zip(runs, of, strict=True) if p != part]
    held = [run for run, p in zip(runs, of, strict=True) if p == part]
    weights: MixtureWeights | None = None
    if trains:
        import torch

        from lab.predict.train import train
        from lab.predict.train_mixture import train_mixture

        torch.set_num_threads(1)
        weights = train_mixture(learned, lambda runs, seed: train(runs, epochs=_EPOCHS, seed=seed))
    return score_all(learned, held, weights)


@lru_cache(maxsize=1)
def _read(path: Path) -> list[FinishedRun]:
    return read_runs(path)


@contextmanager
def _pool(n: int) -> Iterator[Callable[..., Iterator[dict[str, ForecastScores]]]]:
    """`map` over `n` processes; 1: in this process."""
    if n == 1:
        yield map
        return
    with ProcessPoolExecutor(n, get_context("spawn")) as pool:
        yield pool.map


def recognised(folder: Path) -> dict[str, float]:
    """Precision and recall of finding the workflow of a session that names none; empty: MAIN is not there."""
    for path in files(folder):
        if path.name.startswith(MAIN):
            found = recognition(path)
            return {
                "recognised_precision": found.precision,
                "recognised_recall": found.recall,
            }
    return {}


def show(found: Mapping[str, Mapping[str, Row]]) -> None:
    """One row per data set and predictor."""
    rows = [
        (data, *as_text(name, row)) for data, table in found.items() for name, row in table.items()
    ]
    show_table(("workflows", *HEADS), rows)


def figures(found: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """s1, s2, s3: the accuracy of each predictor per data set. If a mixture was trained, also
    `predictor_ahead_points`: its smallest lead over the best Markov model, over all numbers of
    steps and those data sets where Markov-3 is below _SURE at one step."""
    out: dict[str, Any] = {
        key: {
            data: {name: round(row[key], 4) for name, row in table.items()}
            for data, table in found.items()
        }
        for key in _STEPS
    }
    leads = [
        100.0 * row[f"{MIXTURE} - best markov"][key]
        for row in found.values()
        if row["markov3"]["s1"] < _SURE and f"{MIXTURE} - best markov" in row
        for key in _STEPS
    ]
    return out | ({"predictor_ahead_points": min(leads)} if leads else {})


def paths_of(folder: Path) -> list[tuple[str, ...]]:
    """The steps of each run in the smallest file."""
    smallest: list[FinishedRun] = read_runs(
        min(files(folder), key=lambda path: path.stat().st_size)
    )
    return [run.steps for run in smallest]
