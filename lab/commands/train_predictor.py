"""`towerctl train predictor`: the predictor of agent workflows, from recorded ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from towerd.cli.output import echo_json, show_table
from towerd.errors import TowerdError

if TYPE_CHECKING:
    from lab.predict.runs import FinishedRun
    from towerd.policy.predict.graph import GraphWeights

_FILE = click.Path(dir_okay=False, path_type=Path)
_HELD_OUT = 0.3


@click.command()
@click.argument("traces", nargs=-1, required=True, type=_FILE, metavar="TRACE...")
@click.option("--out", type=_FILE, required=True, metavar="FILE", help="Predictor to write, .npz.")
@click.option(
    "--epochs",
    type=click.IntRange(1, 1000),
    default=40,
    show_default=True,
    help="The most passes over the workflows; it stops when it no longer helps.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Another seed, other weights and other held-out workflows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def predictor(traces: tuple[Path, ...], out: Path, epochs: int, seed: int, as_json: bool) -> None:
    """Learn which agent acts next from finished workflows, and write OUT.

    Prints how often the likeliest step 1, 2 and 3 ahead came true on held-out workflows, beside
    Markov models. Predicting needs OUT, but not torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise TowerdError(
            "Training needs torch: install towerd with its extra, pip install -e '.[train]'."
        )
    from lab.predict.baselines import HEADS, as_text, score_all, table
    from lab.predict.runs import split
    from lab.predict.train import train
    from lab.predict.train_mixture import n_parameters, save, train_mixture
    from lab.replay.runs import read_runs

    runs = [run for path in traces for run in read_runs(path)]
    if len(runs) < 4:
        raise TowerdError(f"{len(runs)} workflows are too few to learn from; record more.")
    learned, held = split(runs, _HELD_OUT, seed)

    def progress(epoch: int, loss: float, check: float) -> None:
        if not as_json:
            click.echo(f"epoch {epoch + 1}: loss {loss:.4f}, held out {check:.4f}", err=True)

    def train_graph(seen: Sequence[FinishedRun], seed: int) -> GraphWeights:
        return train(seen, epochs=epochs, seed=seed, progress=progress)

    weights = train_mixture(learned, train_graph, seed=seed)
    save(weights, out)
    rows = table(score_all(learned, held, weights))
    if as_json:
        echo_json({"workflows": len(runs), "parameters": n_parameters(weights), "scores": rows})
        return
    show_table(HEADS, [as_text(name, row) for name, row in rows.items()])
