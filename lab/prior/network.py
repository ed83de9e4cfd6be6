"""`python -m lab.prior.network DATA RUN MINI OUT`: prepare the table for a mini model.

The mixer's state is trained once more on the held-out sessions, with the distribution of the model
MINI beside the counts, so that it knows from the first token how much to trust each. The rest of
the table stays as it is; its name changes, as with every new table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.progress import track

from lab.prior.build import WITHOUT, mixed, n_held, read_corpus, sessions
from lab.prior.save import save
from towerd.codec.errors import UnknownModel
from towerd.codec.forms import training
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.prior import file
from towerd.codec.prior.file import Prior
from towerd.kernels._native import Mixer

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("mini", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--prior",
    "path",
    default=file.PATH,
    show_default=True,
    help="Table to start from.",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--share", default=1.0, show_default=True, help="Of the held-out text.")
@WITHOUT
def main(
    data: Path,
    run: Path,
    mini: Path,
    out: Path,
    path: Path,
    share: float,
    without: tuple[str, ...],
) -> None:
    """Train and write."""
    prior = file.load(path)
    bpe, corpus = read_corpus(data, run, len(prior.ids), without)
    held = mixed(held_out(prior, corpus))
    predictor = ExactPredictor(mini)
    learned, costs = prior.states["state"], []
    some = held[: max(1, round(share * len(held)))]
    for learned, cost in track(steps(prior, predictor, some), "training", len(some)):  # noqa: B007
        costs.append(cost)
    click.echo(f"held-out text: {np.mean(costs[len(costs) // 2 :]):.3f} bits per token")
    states = {"state": prior.states["state"], "network": training.capped(learned, len(prior.ids))}
    save(out, bpe.vocabulary(), prior.weights, prior.tables, states)


def held_out(prior: Prior, corpus: Mapping[str, U32]) -> list[I32]:
    """The sessions, as ranks, that were held out from the table's counts."""
    return [
        part
        for ids in corpus.values()
        for part in sessions(prior.ranks[ids[len(ids) - n_held(len(ids)) :]])
    ]


def steps(
    prior: Prior, predictor: ExactPredictor, held: Sequence[I32]
) -> Iterator[tuple[U32, float]]:
    """(state, bits per token) after each session. UnknownModel for a model of another tokenizer."""
    if predictor.n_tokens != len(prior.ids):
        raise UnknownModel(
            f"The model has {predictor.n_tokens} tokens, the table {len(prior.ids)}."
        )

    counts = training.counts_of(predictor, prior)

    def make(now: U32) -> Mixer:
        return Mixer(prior.weights, prior.tables, now, prior.kinds)

    return training.trained(make, prior.states["state"], held, counts)


if __name__ == "__main__":
    main()
