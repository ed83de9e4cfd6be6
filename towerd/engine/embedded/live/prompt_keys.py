"""PromptKeys: a copy of a chat's cached keys while its prompt is read.

The queries of each batch are held against all keys before them. llama.cpp gives rows out only together
with what precedes them in its state, so each batch adds its own rows to what was copied before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from towerd.slots.rows import Bytes2D, KVRows


class PromptKeys:
    """The keys of the first live positions of a chat, each copied once."""

    def __init__(self, n_max: int, row_bytes: Sequence[int]) -> None:
        """n_max: the most positions that it can hold, which take memory as they come; row_bytes: of a
        key row in each layer"""
        self._planes = [np.empty((n_max, n_bytes), np.uint8) for n_bytes in row_bytes]
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def nbytes(self) -> int:
        """Bytes of the copied keys."""
        return self._n * sum(plane.shape[1] for plane in self._planes)

    def add(self, rows: KVRows) -> None:
        """Copy the keys of the next positions."""
        end = self._n + len(rows)
        for plane, keys in zip(self._planes, rows.k, strict=True):
            plane[self._n : end] = keys
        self._n = end

    def rows(self) -> list[Bytes2D]:
        """For each layer uint8[n, row_bytes], views."""
        return [plane[: self._n] for plane in self._planes]
