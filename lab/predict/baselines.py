"""A trained mixture beside Markov models and its own graph part, on the same held-out workflows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from lab.predict.accuracy import ForecastScores, score_forecasts
from lab.predict.runs import FinishedRun
from towerd.policy.predict.base import END, Forecast
from towerd.policy.predict.markov import Markov, learn
from towerd.policy.predict.mixture import GraphMean, Mixture, MixtureWeights

HEADS = ("predictor", ">1 step", ">2 steps", ">3 steps", ">calibration error", ">log loss")
MIXTURE = "mixture"
MARKOV = ("markov1", "markov2", "markov3")
Row: TypeAlias = dict[str, float]
"""s1, s2, s3, calibration_error, log_loss; a comparison also has s1_error, s2_error, s3_error."""


def score_all(
    learned: Sequence[FinishedRun], held: Sequence[FinishedRun], weights: MixtureWeights | None
) -> dict[str, ForecastScores]:
    """Scores on `held`: Markov 1 to 3, with counts from `learned`; and, given weights that were
    trained on `learned`, the mixture, the mixture without words, and its graph models."""
    asked: dict[str, Callable[[FinishedRun, int], Forecast]] = {}
    for order, name in enumerate(MARKOV, 1):
        markov = Markov(order)
        for run in learned:
            learn(markov, run.steps)
        asked[name] = partial(_by_markov, markov)
    if weights is not None:
        if weights.graphs:
            graph = GraphMean(weights.graphs, weights.agents)
            asked["graph"] = partial(_by_graph, graph, (*weights.agents, END))
        mixture = Mixture(weights)
        if weights.memory.n_ways > 1:
            asked[f"{MIXTURE}, names only"] = partial(_by_names, mixture)
        asked[MIXTURE] = partial(_by_mixture, mixture)
    return {name: score_forecasts(held, ask) for name, ask in asked.items()}


def score_learning(learned: Sequence[FinishedRun], held: Sequence[FinishedRun]) -> ForecastScores:
    """Scores on `held` of a Markov-3 that counts their steps, too, each before it forecasts the next,
    as the daemon's does."""
    markov = Markov()
    for run in learned:
        learn(markov, run.steps)

    def ask(run: FinishedRun, i: int) -> Forecast:
        markov.observe(run.steps[: i + 1])
        said = markov.forecast(run.steps[: i + 1])
        if i + 1 == len(run.steps):
            markov.observe([*run.steps, END])
        return said

    return score_forecasts(held, ask)


def table(scored: Mapping[str, ForecastScores]) -> dict[str, Row]:
    """A row for each predictor, and one for each mixture's lead over the Markov model that is best
    at that number of steps."""
    rows = {name: _row(each) for name, each in scored.items()}
    for name in [name for name in scored if name.startswith(MIXTURE)]:
        rows[f"{name} - best markov"] = ahead(scored, name, MARKOV)
    return rows


def ahead(scored: Mapping[str, ForecastScores], name: str, others: Sequence[str]) -> Row:
    """The lead of a predictor over that of `others` that is best at each number of steps, and its
    standard error."""
    row: Row = {}
    for k in range(len(scored[name].accuracy)):
        best = max(others, key=lambda other: scored[other].accuracy[k])
        row[f"s{k + 1}"], row[f"s{k + 1}_error"] = scored[name].ahead_of(scored[best])[k]
    return row


def as_text(name: str, row: Mapping[str, float]) -> tuple[str, ...]:
    """A row of the table as text, below HEADS."""
    cells = [
        f"{row[key]:+.3f} +- {row[key + '_error']:.3f}"
        if key + "_error" in row
        else f"{row[key]:.3f}"
        for key in ("s1", "s2", "s3")
    ]
    rest = (row.get(key) for key in ("calibration_error", "log_loss"))
    return (name, *cells, *("" if value is None else f"{value:.3f}" for value in rest))


def _row(scored: ForecastScores) -> Row:
    steps = {f"s{k + 1}": share for k, share in enumerate(scored.accuracy)}
    sure = {"calibration_error": scored.calibration_error, "log_loss": scored.log_loss}
    return steps | sure


def _by_markov(markov: Markov, run: FinishedRun, i: int) -> Forecast:
    return markov.forecast(run.steps[: i + 1])


def _by_graph(graph: GraphMean, names: Sequence[str], run: FinishedRun, i: int) -> Forecast:
    chances = graph.chances(run.steps[: i + 1], run.meanings[i] if run.meanings else None)
    return [dict(zip(names, row, strict=True)) for row in chances.tolist()]


def _by_names(mixture: Mixture, run: FinishedRun, i: int) -> Forecast:
    return mixture.forecast(run.steps[: i + 1])


def _by_mixture(mixture: Mixture, run: FinishedRun, i: int) -> Forecast:
    return mixture.forecast(run.steps[: i + 1], run.meanings[: i + 1])
