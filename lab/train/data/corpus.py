"""The training text as ids on disk, one file per source and split, and batches drawn from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.texts.chat_records import ChatRecord
from lab.train.data.form import ROLES, Ids, Marks, TextForm, mark_of
from lab.train.data.manifest import TextSource
from lab.train.data.records import Dataset
from lab.train.errors import TrainError

ENCODE_AT_ONCE = 512
CYCLE = 1000
"""Windows after which every source has had exactly its share."""


@dataclass(frozen=True, slots=True)
class DevText:
    """The evaluation text of one source: its records in shuffled order, back to back."""

    ids: Ids
    marks: Marks
    bytes_of_role: tuple[int, ...]
    """UTF-8 bytes of the contents, per row of ROLES."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Ids [n] of each source's records in shuffled order, back to back."""

    train: dict[str, Ids]
    dev: dict[str, DevText]
    weights: dict[str, float]

    @property
    def n_tokens(self) -> int:
        """Tokens to train on."""
        return sum(len(ids) for ids in self.train.values())


def build_corpus(
    data: Dataset,
    manifest: Mapping[str, TextSource],
    form: TextForm,
    folder: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Encode `data` in `form`, or reuse what an earlier run left in `folder` for the same two.

    `progress` is called with (records done, records in all).
    """
    key = hashlib.blake2b(f"{data.fingerprint} {form.fingerprint}".encode(), digest_size=8)
    folder = folder / key.hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    n_total = sum(len(records) for split in (data.train, data.dev) for records in split.values())
    n_done = 0
    train: dict[str, Ids] = {}
    dev: dict[str, DevText] = {}
    for split, by_source in (("train", data.train), ("dev", data.dev)):
        for source, records in sorted(by_source.items()):
            records = shuffled(records)
            ids, marks = _stored(folder / f"{source}.{split}", records, form)
            if split == "train":
                train[source] = ids
            else:
                dev[source] = DevText(ids, marks, bytes_of_role(records))
            n_done += len(records)
            if progress is not None:
                progress(n_done, n_total)
    return Corpus(train, dev, {name: manifest[name].weight for name in train})


def shuffled(records: Sequence[ChatRecord]) -> list[ChatRecord]:
    """The records in order of the hash of `src`, which is the same on every machine."""

    def key(record: ChatRecord) -> bytes:
        return hashlib.blake2b(record.src.encode(), digest_size=8).digest()

    return sorted(records, key=key)


def bytes_of_role(records: Sequence[ChatRecord]) -> tuple[int, ...]:
    """UTF-8 bytes of all contents, per row of ROLES."""
    totals = [0] * len(ROLES)
    for record in records:
        for message in record.messages:
            totals[mark_of(message.role)] += len(message.content.encode())
    return tuple(totals)


def _stored(stem: Path, records: Sequence[ChatRecord], form: TextForm) -> tuple[Ids, Marks]:
    """Read `stem`.ids.npy and `stem`.marks.npy; write them first if they are missing."""
    paths = [stem.with_name(f"{stem.name}.{kind}.npy") for kind in ("ids", "marks")]
    if not all(path.exists() for path in paths):
        parts = list(_encoded(records, form))
        arrays = [np.concatenate([part[i] for part in parts]) for i in range(2)]
        for path, array in zip(paths, arrays, strict=True):
            part = path.with_name(f".{path.name}.part")
            with part.open("wb") as file:
                np.save(file, array)
            os.replace(part, path)
    ids, marks = (np.load(path, mmap_mode="r") for path in paths)
    return ids, marks


def _encoded(records: Sequence[ChatRecord], form: TextForm) -> Iterator[tuple[Ids, Marks]]:
    for first in range(0, len(records), ENCODE_AT_ONCE):
        for encoded in form.encode(records[first : first + ENCODE_AT_ONCE]):
            yield encoded.ids, encoded.marks


class Windows:
    """Window number k of training, for every k >= 0. It depends only on (corpus, seed, k), so a
    resumed run continues with exactly the text it would have seen.

    Sources take turns by weight; within a source every window is seen once before any is seen
    again, in another order and from another offset each time. With `n_windows`, only the first
    `n_windows` windows are used, again and again.
    """

    def __init__(self, corpus: Corpus, n_ctx: int, seed: int, n_windows: int | None = None) -> None:
        self._n_ctx, self._seed, self._n_windows = n_ctx, seed, n_windows
        self._ids = {name: ids for name, ids in corpus.train.items() if len(ids) > 2 * n_ctx}
        if not self._ids:
            raise TrainError(f"No source has {2 * n_ctx} tokens to train on: give more data.")
        total = sum(corpus.weights[name] for name in self._ids)
        turns = [
            name
            for name in self._ids
            for _ in range(max(1, round(CYCLE * corpus.weights[name] / total)))
        ]
        order = np.random.default_rng([seed, 0]).permutation(len(turns))
        self._turns = [turns[i] for i in order]
        self._rank = _ranks(self._turns)
        self._per_cycle = {name: turns.count(name) for name in self._ids}

    def window(self, k: int) -> tuple[str, int]:
        """(source, first token) of window k."""
        if self._n_windows is not None:
            k %= self._n_windows
        cycle, turn = divmod(k, len(self._turns))
        name = self._turns[turn]
        n_windows = len(self._ids[name]) // self._n_ctx - 1
        epoch, rank = divmod(cycle * self._per_cycle[name] + self._rank[turn], n_windows)
        stream = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        chance = np.random.default_rng([self._seed, 1, stream, epoch])
        offset = int(chance.integers(self._n_ctx))
        return name, offset + int(chance.permutation(n_windows)[rank]) * self._n_ctx

    def batch(self, first: int, n: int) -> Ids:
        """Windows first to first + n: [n, n_ctx + 1], so that every token has a successor."""
        rows = []
        for k in range(first, first + n):
            name, start = self.window(k)
            rows.append(self._ids[name][start : start + self._n_ctx + 1])
        return np.stack(rows)


def _ranks(turns: Sequence[str]) -> list[int]:
    """How many earlier turns each turn's source has had."""
    seen: dict[str, int] = {}
    ranks = []
    for name in turns:
        ranks.append(seen.get(name, 0))
        seen[name] = ranks[-1] + 1
    return ranks
