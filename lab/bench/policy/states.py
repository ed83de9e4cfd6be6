"""`towerctl lab bench states`: whether the served model's own state tells the next agent.

Predictors of agents' next steps with the same training and the same tests, every task held out once:
without any state, with that at the last token of each step's prompt, and with that at the end of its
answer; beside them Markov models and hashed words. States are learned from as words are: the graph
models take them as their text, the regression compares them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.policy import agent_workflows
from lab.bench.policy.transcripts import StepStates, TranscriptReader, transcripts
from lab.predict.accuracy import ForecastScores, concatenate
from lab.predict.baselines import MARKOV, MIXTURE, Row, ahead, score_all, score_learning, table
from lab.predict.runs import FinishedRun, folds
from lab.predict.states import N_STATE, Floats, unit
from towerd.cli.bench.harness.report import Report
from towerd.errors import TowerdError
from towerd.models.bundled import default_model
from towerd.policy.predict.steps import N_TEXT

STEPS_MAX = 1000
"""Steps of a data set that are evaluated, in whole tasks."""
QUICK_STEPS_MAX = 150
_PARTS = 5
_EPOCHS = 25
KINDS = ("names", "prompt", "answer", "words")
"""What a predictor knows besides names: nothing, a state, or the hashed words of all that was said."""
_STATES = ("prompt", "answer")
_STEPS = ("s1", "s2", "s3")


@dataclass(frozen=True, slots=True)
class EvaluatedRuns:
    """The workflows of a data set, and of each its states."""

    runs: list[FinishedRun]
    states: list[StepStates]


async def run(
    model: Path | None, quick: bool, *, workflows: Path, states: Path | None = None
) -> Report:
    """Measure on every file of the folder `workflows`. states: a folder that keeps what the model
    said of each file, for the next time. Raises
    TraceError and, without torch, TowerdError."""
    if find_spec("torch") is None:
        raise TowerdError(
            "This benchmark trains with torch: install towerd with its extra, pip install -e '.[train]'."
        )
    path = model or default_model()
    report = Report("states", path.name)
    steps_max = QUICK_STEPS_MAX if quick else STEPS_MAX
    reader = TranscriptReader(path)
    try:
        read = {
            file.name.split(".")[0]: evaluated(file, reader, steps_max, states)
            for file in agent_workflows.files(workflows)
        }
    finally:
        reader.close()
    report.details["tokens"] = reader.n_tokens
    found = {
        name: compare(each, parts=1 if quick else _PARTS, graphs=not quick)
        for name, each in read.items()
    }
    found |= {f"{name}, from others": of_others(read, name) for name in read if len(read) > 1}
    agent_workflows.show(found)
    report.figures |= figures(found)
    return report


def evaluated(
    file: Path, reader: TranscriptReader, steps_max: int, folder: Path | None
) -> EvaluatedRuns:
    """At most `steps_max` steps of whole tasks of a file, in random order, and their states, from
    `folder` if they are there."""
    pairs = list(transcripts(file))
    n_steps: dict[str, int] = {}
    for run, _ in pairs:
        n_steps[run.group] = n_steps.get(run.group, 0) + len(run.steps)
    groups = sorted(n_steps)
    random.Random(0).shuffle(groups)
    chosen, left = set[str](), steps_max
    for group in groups:
        if n_steps[group] <= left:
            chosen.add(group)
            left -= n_steps[group]
    pairs = [pair for pair in pairs if pair[0].group in chosen]
    kept = None if folder is None else folder / f"{file.name.split('.')[0]}-{steps_max}.npz"
    if kept is not None and kept.exists():
        states = _loaded(kept, [len(run.steps) for run, _ in pairs])
    else:
        states = [reader.states(said) for _, said in pairs]
        if kept is not None:
            prompts, answers = zip(*((each.prompt, each.answer) for each in states), strict=True)
            np.savez(kept, prompt=np.concatenate(prompts), answer=np.concatenate(answers))
    return EvaluatedRuns([run for run, _ in pairs], states)


def _loaded(kept: Path, lengths: Sequence[int]) -> list[StepStates]:
    with np.load(kept) as found:
        cut = np.cumsum(lengths)[:-1]
        both = [np.split(found[name], cut) for name in _STATES]
    return [StepStates(prompt, answer) for prompt, answer in zip(*both, strict=True)]


def knowing(read: EvaluatedRuns, kind: str, learned: Sequence[bool]) -> list[FinishedRun]:
    """The runs as a predictor of a kind sees them. States are centred by the mean of those of the
    runs to learn from."""
    if kind == "words":
        return read.runs
    if kind == "names":
        return [replace(run, meanings=()) for run in read.runs]
    states: list[Floats] = [getattr(each, kind) for each in read.states]
    mean = np.concatenate([s for s, is_learned in zip(states, learned, strict=True) if is_learned])
    found = []
    for run, each in zip(read.runs, states, strict=True):
        padded = np.zeros((len(each), N_TEXT), np.float32)
        padded[:, :N_STATE] = unit(each - mean.mean(0))
        found.append(replace(run, meanings=tuple(padded)))
    return found


def compare(read: EvaluatedRuns, parts: int, *, graphs: bool) -> dict[str, Row]:
    """Scores of all predictors with every task held out once, or `parts` of five parts. graphs:
    whether the mixture has graph models."""
    of = folds(read.runs, _PARTS, 0)
    scored: dict[str, list[ForecastScores]] = {}
    for part in range(parts):
        learned = [p != part for p in of]
        for kind in KINDS:
            for name, each in _scores(
                knowing(read, kind, learned), learned, kind, graphs=graphs
            ).items():
                scored.setdefault(name, []).append(each)
    whole = {name: concatenate(each) for name, each in scored.items()}
    rows = table(whole)
    for kind in KINDS[1:]:
        name = f"{MIXTURE}, {kind}"
        rows[f"{name} - names"] = ahead(whole, name, [f"{MIXTURE}, names"])
    return rows


def of_others(read: Mapping[str, EvaluatedRuns], name: str) -> dict[str, Row]:
    """Scores on all workflows of one data set of predictors that learned from the others alone."""
    order = [each for key, each in read.items() if key != name] + [read[name]]
    together = EvaluatedRuns(
        [r for e in order for r in e.runs], [s for e in order for s in e.states]
    )
    n_held = len(read[name].runs)
    learned = [True] * (len(together.runs) - n_held) + [False] * n_held
    scored: dict[str, ForecastScores] = {}
    for kind in KINDS:
        scored |= _scores(knowing(together, kind, learned), learned, kind, graphs=False)
    return table(scored)


def _scores(
    runs: Sequence[FinishedRun], learned: Sequence[bool], kind: str, *, graphs: bool
) -> dict[str, ForecastScores]:
    """By the name of a predictor: Markov models, if `kind` is names, the graph models and the
    mixture."""
    import torch

    from lab.predict.train import train
    from lab.predict.train_mixture import train_mixture

    torch.set_num_threads(1)
    seen = [run for run, is_learned in zip(runs, learned, strict=True) if is_learned]
    held = [run for run, is_learned in zip(runs, learned, strict=True) if not is_learned]
    weights = train_mixture(
        seen, (lambda some, seed: train(some, epochs=_EPOCHS, seed=seed)) if graphs else None
    )
    scored = score_all(seen, held, weights)
    markov = {name: scored[name] for name in MARKOV if kind == "names"}
    if markov:
        markov["markov3, learning"] = score_learning(seen, held)
    ours = {f"{name}, {kind}": scored[name] for name in ("graph", MIXTURE) if name in scored}
    return markov | ours


def figures(found: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Accuracy and losses of each predictor per data set, and `state_points`: what the state of the
    prompt adds to the mixture's accuracy one step ahead, where it adds least."""
    out: dict[str, Any] = {
        key: {
            data: {name: round(row[key], 4) for name, row in rows.items() if key in row}
            for data, rows in found.items()
        }
        for key in (*_STEPS, "log_loss", "calibration_error")
    }
    gains = [
        100 * rows[f"{MIXTURE}, prompt - names"]["s1"]
        for rows in found.values()
        if f"{MIXTURE}, prompt - names" in rows
    ]
    return out | {"state_points": min(gains)}
