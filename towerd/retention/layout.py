"""The order in which to write the rows of dropped positions, so that a recall reads few runs.

A recall fetches what one query looks for. Positions with similar keys are recalled together, so
they are stored side by side: in the order of a DCI tree over the keys of all heads at once, each
point before its descendants.
"""

from __future__ import annotations

import numpy as np

from towerd.kernels.dci import DciConfig, keys_in, make_dci_tree
from towerd.retention.base import Positions, Rows

SKETCH_DIMS = 64
"""Dimensions that stand for the keys of all heads of a position: random projections preserve
distances."""


def cluster_order(keys: Rows, config: DciConfig | None = None) -> Positions:
    """int64[n]: the indices of keys [layers, KV heads, n, head size], similar ones side by side."""
    n = keys.shape[2]
    sketch = _sketch(keys)
    tree = make_dci_tree(sketch.shape[1], config)
    tree.add(keys_in(sketch))
    parents = tree.parents()
    below: dict[int, list[int]] = {}
    for i in range(n):
        below.setdefault(int(parents[i]), []).append(i)
    order: list[int] = []
    waiting = [-1]
    while waiting:
        point = waiting.pop()
        order += [point] if point >= 0 else []
        members = below.get(point, [])
        order += [i for i in members if i not in below]
        waiting += reversed([i for i in members if i in below])
    return np.array(order, np.int64)


def _sketch(keys: Rows) -> Rows:
    """[n, at most SKETCH_DIMS]: all keys of a position, each head scaled to the same length."""
    length = np.sqrt((keys**2).sum(-1).mean(-1))[..., None, None]
    scaled = keys / np.maximum(length, np.float32(1e-20))
    rows = scaled.transpose(2, 0, 1, 3).reshape(keys.shape[2], -1)
    if rows.shape[1] > SKETCH_DIMS:
        chance = np.random.default_rng(1)
        directions = chance.standard_normal((rows.shape[1], SKETCH_DIMS), dtype=np.float32)
        rows = rows @ (directions / np.float32(np.sqrt(SKETCH_DIMS)))
    return np.ascontiguousarray(rows, np.float32)
