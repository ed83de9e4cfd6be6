"""Keys in an array, as a policy that can recall reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from towerd.kernels._native import DciKeys
from towerd.kernels.dci import keys_at
from towerd.retention import Positions, Rows


@dataclass(frozen=True, slots=True)
class ArrayKeys:
    """float32[layers, KV heads, n, head size]."""

    values: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, layer: int, head: int, wanted: Positions) -> Rows:
        return np.ascontiguousarray(self.values[layer, head, wanted], np.float32)

    def at(self, layer: int, head: int, wanted: Positions) -> DciKeys:
        rows = np.ascontiguousarray(self.values[layer, head], np.float32).view(np.uint8)
        which = np.zeros(len(wanted), np.int32)
        return keys_at([rows], ["f32"], which, wanted.astype(np.int32), self.shape[3])
