"""The tokenizer of a run: read from its folder, taken from a GGUF, or learned from the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.train.data.bpe import Bpe, train_bpe
from lab.train.data.corpus import shuffled
from lab.train.data.manifest import TextSource
from lab.train.data.records import Dataset

TOKENIZER_BYTES = 20_000_000
"""Amount of text that the tokenizer learns from."""


def tokenizer_of(
    path: Path,
    data: Dataset,
    manifest: Mapping[str, TextSource],
    n_vocab: int,
    given: Path | None = None,
) -> Bpe:
    """The run's tokenizer in `path`. If it is missing, it is taken from the GGUF `given` or learned
    from the text, and written there."""
    if not path.exists():
        bpe = Bpe.from_gguf(given) if given else train_bpe(_sample(data, manifest), n_vocab)
        bpe.save(path)
    return Bpe.load(path)


def _sample(data: Dataset, manifest: Mapping[str, TextSource]) -> Iterator[str]:
    """Texts of the sources in proportion to their weights."""
    total = sum(manifest[name].weight for name in data.train)
    for name, records in sorted(data.train.items()):
        n_left = int(TOKENIZER_BYTES * manifest[name].weight / total)
        for record in shuffled(records):
            for message in record.messages:
                yield message.content
                n_left -= len(message.content.encode())
            if n_left <= 0:
                break
