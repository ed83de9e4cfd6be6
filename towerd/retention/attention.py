"""Attention mass: how much attention each cached position gets from some queries.

llama.cpp's flash attention never has the weights, so they are computed again from the queries
that were captured and the keys that are cached; without flash attention they come out the same.
llama.cpp holds or drops a position for all heads and layers at once: these are averaged.
"""

from __future__ import annotations

import numpy as np

from towerd.retention.base import Mass, Positions, Rows


def attention_mass(
    queries: Rows, keys: Rows, query_places: Positions, key_places: Positions, scale: float
) -> Mass:
    """float32[n]: the attention that each of n positions gets, summed over m queries (each
    spreads 1), averaged over heads and layers.

    queries: float32[layers, heads, m, head size]; keys: float32[layers, KV heads, n, head size],
    both rotated by RoPE; query head h reads KV head h // (heads / KV heads)
    query_places int64[m], key_places int64[n]: a query sees the keys at its place and before
    scale: what scores are multiplied by before the softmax (llama.cpp `src/llama-graph.cpp`,
    build_attn_mha). Raises ValueError for shapes that do not fit or a query that sees no key."""
    layers, heads, m, size = queries.shape
    n_kv, n = keys.shape[1], keys.shape[2]
    if keys.shape != (layers, n_kv, n, size) or n_kv == 0 or heads % n_kv:
        raise ValueError(f"queries {queries.shape} do not fit keys {keys.shape}")
    if query_places.shape != (m,) or key_places.shape != (n,):
        raise ValueError("places must be one for each query and each key")
    hidden = key_places[None, :] > query_places[:, None]
    if hidden.all(axis=1).any():
        raise ValueError("a query sees no key")
    total = np.zeros(n, np.float64)
    for q, k in zip(queries, keys, strict=True):
        grouped = q.reshape(n_kv, heads // n_kv * m, size)
        scores = (grouped @ k.transpose(0, 2, 1)).reshape(heads, m, n)
        scores *= np.float32(scale)
        scores[:, hidden] = -np.inf
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        weights = 1.0 / scores.sum(axis=2, dtype=np.float64)
        total += np.einsum("hmn,hm->n", scores, weights, optimize=True)
    return np.asarray(total / (layers * heads), np.float32)
