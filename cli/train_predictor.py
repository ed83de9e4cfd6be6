"""`towerctl train predictor`: the graph model of agent workflows, from recorded ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.output import echo_json, show_table
from towerd.errors import TowerdError

if TYPE_CHECKING:
    from towerd.policy.predict.base import Forecast
    from towerd.policy.predict.graph import GraphPredictor
    from towerd.policy.predict.markov import Markov
    from towerd.policy.predict.runs import Run

_FILE = click.Path(dir_okay=False, path_type=Path)
_HELD_OUT = 0.3


@click.command()
@click.argument("traces", nargs=-1, required=True, type=_FILE, metavar="TRACE...")
@click.option("--out", type=_FILE, required=True, metavar="FILE", help="Predictor to write, .npz.")
@click.option("--epochs", type=click.IntRange(1, 1000), default=40, show_default=True,
              help="The most passes over the workflows; it stops when it no longer helps.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True,
              help="Another seed, other weights and other held-out workflows.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def predictor(traces: tuple[Path, ...], out: Path, epochs: int, seed: int, as_json: bool) -> None:
    """Learn which agent acts next from workflows that ended, and write OUT.

    Prints how often the likeliest step 1, 2 and 3 ahead came true on workflows held out, beside
    Markov models. What is written is needed to predict; torch is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise TowerdError(
            "Training needs torch: install towerd with its extra, pip install 'towerd[train]'."
        )
    from towerd.policy.predict.runs import split
    from towerd.policy.predict.train import train
    from towerd.replay.runs import read_runs

    runs = [run for path in traces for run in read_runs(path)]
    if len(runs) < 4:
        raise TowerdError(f"{len(runs)} workflows are too few to learn from; record more.")
    learned, held = split(runs, _HELD_OUT, seed)

    def progress(epoch: int, loss: float, check: float) -> None:
        if not as_json:
            click.echo(f"epoch {epoch + 1}: loss {loss:.4f}, held out {check:.4f}", err=True)

    weights = train(learned, epochs=epochs, seed=seed, progress=progress)
    weights.save(out)
    rows = scores(learned, held, weights)
    if as_json:
        echo_json({"workflows": len(runs), "parameters": weights.n_parameters, "scores": rows})
        return
    heads = ("predictor", ">1 step", ">2 steps", ">3 steps", ">calibration error")
    show_table(heads, [_as_text(name, row) for name, row in rows.items()])


def scores(learned: list[Run], held: list[Run], weights: Any = None) -> dict[str, dict[str, float]]:
    """Accuracy on the held-out runs of Markov 1-3 and, with weights, the graph model."""
    from towerd.policy.predict.accuracy import accuracy
    from towerd.policy.predict.graph import GraphPredictor
    from towerd.policy.predict.markov import Markov, learn

    asked: dict[str, Callable[[Run, int], Forecast]] = {}
    for order in (1, 2, 3):
        markov = Markov(order)
        for run in learned:
            learn(markov, run.steps)
        asked[f"markov{order}"] = partial(_by_markov, markov)
    if weights is not None:
        asked["graph"] = partial(_by_graph, GraphPredictor(weights))
        asked["graph+markov3"] = partial(_by_both, asked["graph"], asked["markov3"])
    return {name: _row(accuracy(held, ask)) for name, ask in asked.items()}


def _by_markov(markov: Markov, run: Run, i: int) -> Forecast:
    return markov.forecast(run.steps[: i + 1])


def _by_graph(graph: GraphPredictor, run: Run, i: int) -> Forecast:
    return graph.forecast(run.steps[: i + 1], run.meanings[i] if run.meanings else None)


def _by_both(
    first: Callable[[Run, int], Forecast], second: Callable[[Run, int], Forecast], run: Run, i: int
) -> Forecast:
    from towerd.policy.predict.blend import blend

    return blend([first(run, i), second(run, i)])


def _row(found: Any) -> dict[str, float]:
    steps = {f"s{k + 1}": share for k, share in enumerate(found.right)}
    return steps | {"calibration_error": found.calibration_error}


def _as_text(name: str, row: dict[str, float]) -> tuple[str, ...]:
    return (name, *(f"{row[key]:.3f}" for key in ("s1", "s2", "s3", "calibration_error")))
