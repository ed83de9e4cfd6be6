"""What predicts a token's rows without evaluating the model: tables by token, and a small decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, dequantize

from lab.bench.prediction.rows import Floats, TextRows
from towerd.tokens import Ids

SHRINK = 1.0
"""Rows of the mean that each entry of a table starts from."""
HIDDEN = 512
EPOCHS = 4
_BATCH = 64


class RowPredictor(Protocol):
    """Predicts some planes of rows, side by side."""

    nbytes: int
    """Of its tables or weights, at 16 bits a number."""

    def predict(self, ids: Ids) -> Floats:
        """float32[n, elements] for ids int32[n, k], a row's own token first."""


def side_by_side(rows: TextRows, planes: Sequence[int]) -> Floats:
    """float32[n, elements] of planes."""
    return np.concatenate([rows.plane(i) for i in planes], 1)


class TokenMeans:
    """Means by the last `n_ids` tokens, each drawn towards what fewer of them predict."""

    def __init__(self, ids: Ids, values: Floats, n_ids: int) -> None:
        self._n_ids = n_ids
        self.nbytes = 0
        self._below = TokenMeans(ids, values, n_ids - 1) if n_ids else None
        rest = values if self._below is None else values - self._below.predict(ids)
        keys = _keys(ids, n_ids)
        self._keys, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
        sums = np.zeros((len(self._keys), values.shape[1]), np.float32)
        order = np.argsort(places, kind="stable")
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        np.add.reduceat(rest[order], starts, axis=0, out=sums)
        self._means = sums / (counts[:, None] + (SHRINK if n_ids else 0)).astype(np.float32)
        self.nbytes = 2 * self._means.size
        if self._below is not None:
            self.nbytes += self._below.nbytes

    def known(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which rows there is an entry for."""
        return np.isin(_keys(ids, self._n_ids), self._keys)

    def predict(self, ids: Ids) -> Floats:
        keys = _keys(ids, self._n_ids)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = self._keys[at] == keys
        found = np.where(known[:, None], self._means[at], np.float32(0))
        return found if self._below is None else found + self._below.predict(ids)


def _keys(ids: Ids, n: int) -> npt.NDArray[np.int64]:
    found = np.zeros(len(ids), np.int64)
    for i in range(n):
        found = found << 20 | ids[:, i]
    return found


class Decoder:
    """A network of one hidden layer on the embeddings of the last tokens, trained here."""

    def __init__(self, path: Path, ids: Ids, values: Floats, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._vectors = embeddings(path, ids)
        self._mean = values.mean(0)
        self._scale = np.sqrt(values.var(0).mean()).astype(np.float32)
        n_in = ids.shape[1] * next(iter(self._vectors.values())).shape[0]
        self._path = path
        self._net = torch.nn.Sequential(
            torch.nn.Linear(n_in, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, len(self._mean))
        )
        self.nbytes = 2 * sum(p.numel() for p in self._net.parameters())
        self._train(ids, (values - self._mean) / self._scale)

    def predict(self, ids: Ids) -> Floats:
        self._vectors |= embeddings(self._path, ids, self._vectors)
        with torch.no_grad():
            out = self._net(self._input(ids)).numpy()
        return np.asarray(out * self._scale + self._mean, np.float32)

    def _input(self, ids: Ids) -> torch.Tensor:
        rows = [np.concatenate([self._vectors[i] for i in line]) for line in ids.tolist()]
        return torch.from_numpy(np.stack(rows))

    def _train(self, ids: Ids, wanted: Floats) -> None:
        n_steps = EPOCHS * -(-len(ids) // _BATCH)
        optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=n_steps)
        for _ in range(EPOCHS):
            for places in torch.randperm(len(ids)).split(_BATCH):
                at = places.numpy()
                loss = (self._net(self._input(ids[at])) - torch.from_numpy(wanted[at])).square()
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
                schedule.step()


def embeddings(path: Path, ids: Ids, known: dict[int, Floats] | None = None) -> dict[int, Floats]:
    """The embedding of each token in `ids`, scaled to a mean square of 1."""
    missing = np.setdiff1d(ids, list(known or ()))
    (tensor,) = (t for t in GGUFReader(path).tensors if t.name == "token_embd.weight")
    found = dequantize(tensor.data[missing], tensor.tensor_type).astype(np.float32)
    found /= np.sqrt((found**2).mean(1, keepdims=True)) + 1e-6
    return dict(zip(missing.tolist(), found, strict=True))
