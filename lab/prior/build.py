"""`python -m lab.prior.build DATA RUN OUT`: the prior of a folder of chat records.

RUN is the folder of a training run of the mini model. Its tokenizer and its encoded corpus are
used, and the corpus is built if it is missing. The last part of each source is not counted but used
to train the maps and weights, so that they learn what counts mean for unseen text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.progress import track

from lab.prior import tables
from lab.prior.save import save
from lab.train.data.bpe import START, Bpe
from lab.train.data.corpus import build_corpus
from lab.train.data.form import MiniForm
from lab.train.data.manifest import read_manifest
from lab.train.data.records import read_dataset
from lab.train.data.tokenizer import tokenizer_of
from towerd.codec.forms import training
from towerd.codec.prior import file
from towerd.kernels._native import Mixer

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
HELD_SHARE, HELD_TOKENS_MAX = 0.05, 150_000
WORTH = {"human": 2.0, "assistant": 1.3, "code": 1.2, "task": 0.5}
"""The value of a saved bit when tables are pruned, by kind of source: there are many prompts made
from templates, which would crowd out text that people write."""

SESSION_TOKENS = 4400
"""Training text is learned in pieces of about 16 KB, each as a session of its own."""

WITHOUT = click.option(
    "--without",
    multiple=True,
    metavar="SOURCE",
    help="A source to leave out, to measure on its text; may be given again.",
)


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--mib", default=11.0, show_default=True, help="Size of the tables.")
@WITHOUT
@click.option("--vocab", default=4096, show_default=True, help="Tokens, if RUN has no tokenizer.")
def main(
    data: Path, run: Path, out: Path, mib: float, without: tuple[str, ...], vocab: int
) -> None:
    """Count, prune, train and write."""
    bpe, train = read_corpus(data, run, vocab, without)
    manifest = read_manifest()
    build(bpe, train, {name: WORTH[manifest[name].kind] for name in train}, out, mib)


def read_corpus(
    data: Path, run: Path, vocab: int, without: Collection[str]
) -> tuple[Bpe, dict[str, U32]]:
    """The tokenizer of a training run (of `vocab` tokens if it has none yet), and the ids of each
    source but those `without`. Raises ClickException for one that is not there."""
    manifest = read_manifest()
    dataset = read_dataset(data, manifest)
    bpe = tokenizer_of(run / "tokenizer.json", dataset, manifest, vocab)
    corpus = build_corpus(dataset, manifest, MiniForm(bpe), run / "corpus")
    if unknown := sorted(set(without) - corpus.train.keys()):
        known = ", ".join(corpus.train)
        raise click.ClickException(f"There is no source {unknown[0]}; there are {known}.")
    kept = corpus.train.keys() - set(without)
    return bpe, {name: np.asarray(ids) for name, ids in corpus.train.items() if name in kept}


def n_held(n_ids: int) -> int:
    """How many of a source's ids, the last ones, are held out."""
    return min(int(HELD_SHARE * n_ids), HELD_TOKENS_MAX)


def build(
    bpe: Bpe, corpus: Mapping[str, U32], worth: Mapping[str, float], out: Path, mib: float
) -> None:
    """Write the prior of a corpus of ids by source; `worth`: see `tables.count`, by source."""
    ranks = file.ranks_of(_pieces(bpe))
    counted, worths, held = [], [], []
    for name, ids in corpus.items():
        n_counted = len(ids) - n_held(len(ids))
        counted.append(ranks[ids[:n_counted]])
        worths.append(np.full(n_counted, worth[name], np.float32))
        held += sessions(ranks[ids[n_counted:]])
    text = np.concatenate(counted).astype(np.uint32)
    weights = np.bincount(text, minlength=len(ranks)).astype(np.uint32)
    found = tables.build(text, len(ranks), int(mib * (1 << 20)), worth=np.concatenate(worths))
    click.echo(f"{len(text):,} tokens counted; tables of {_mib(found):.1f} MiB")
    done = _trained(file.kinds_of(_pieces(bpe), START), weights, found, held)
    save(out, bpe.vocabulary(), weights, found, {"state": done})


def _trained(
    kinds: npt.NDArray[np.uint8],
    weights: U32,
    found: list[tuple[U32, npt.NDArray[np.uint16]]],
    held: list[I32],
) -> U32:
    """The state after the held-out sessions."""
    learned, costs = training.untrained(len(weights)), []
    steps = training.trained(lambda now: Mixer(weights, found, now, kinds), learned, mixed(held))
    for learned, cost in track(steps, "training", total=len(held)):  # noqa: B007
        costs.append(cost)
    click.echo(f"held-out text: {np.mean(costs[len(costs) // 2 :]):.3f} bits per token")
    return training.capped(learned, len(weights))


def mixed(held: list[I32]) -> list[I32]:
    """Sessions in an order that mixes the sources."""
    return [held[i] for i in np.random.default_rng(0).permutation(len(held))]


def _pieces(bpe: Bpe) -> list[bytes]:
    """Bytes of each token; b"" for control tokens."""
    from lab.train.data.bpe import CONTROLS

    plain = {chr(b): b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    rest = [b for b in range(256) if chr(b) not in plain]
    table = plain | {chr(256 + i): b for i, b in enumerate(rest)}
    body = [bytes(table[char] for char in piece) for piece in bpe.pieces[len(CONTROLS) :]]
    return [b""] * len(CONTROLS) + body


def sessions(ranks: I32) -> list[I32]:
    """The ranks in pieces, each of which is learned as one session."""
    size = SESSION_TOKENS
    return [np.ascontiguousarray(ranks[i : i + size]) for i in range(0, len(ranks), size)]


def _mib(found: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]]) -> float:
    return sum(index.nbytes + data.nbytes for index, data in found) / (1 << 20)


if __name__ == "__main__":
    main()
