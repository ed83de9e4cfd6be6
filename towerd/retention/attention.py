"""Attention mass: how much attention each cached position gets from some queries.

llama.cpp's flash attention never stores the weights, so they are recomputed from the captured
queries and the cached keys; without flash attention the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.retention.base import Mass, Positions, Rows


def attention_mass(
    queries: Iterable[Rows],
    keys: Sequence[npt.NDArray[np.uint8]],
    format: str,
    query_places: Positions,
    key_places: Positions,
    scale: float,
    sinks: Sequence[Mass | None] = (),
    weights: Mass | None = None,
) -> Mass:
    """float32[layers, KV heads, n]: the attention that each of n positions gets, summed over m
    queries (each spreads its weight), averaged over the heads that read a KV head.

    queries: for each layer float32[m, heads, head size]; keys: for each layer uint8[n, row_bytes],
    KV heads * head size elements in `format`, a cache type; both rotated by RoPE, and alike by a
    Hadamard matrix (`rotated`) if the cache rotates its keys; query head h reads KV head h // (heads /
    KV heads)
    query_places int64[m]; key_places int64[n], ascending: a query sees the keys at its place and
    before
    scale: what scores are multiplied by before the softmax (llama.cpp `src/llama-graph.cpp`,
    build_attn_mha)
    sinks: for each layer float32[heads], the scores of what takes its share beside all keys, or None;
        none of any layer if there are no entries
    weights: float32[m], of each query; None: 1
    Raises ValueError for shapes that do not match, a query that sees no key, and rows that are not
    finite."""
    if any(len(rows) != len(key_places) for rows in keys):
        raise ValueError("keys: expected a row of every place in every layer")
    if (np.diff(key_places) <= 0).any():
        raise ValueError("key_places: not in ascending order")
    n_seen = np.searchsorted(key_places, query_places, side="right").astype(np.int64)
    masses = []
    for layer, rows, sink in zip_longest(queries, keys, sinks):
        if layer is None or rows is None:
            raise ValueError("keys: expected those of every layer")
        m, heads, size = layer.shape
        if query_places.shape != (m,):
            raise ValueError("query_places: expected one for each query")
        flat = layer.reshape(m, heads * size)
        mass = dispatch.attention_mass(
            flat, rows, format, n_seen, size, scale, sinks=sink, weights=weights
        )
        masses.append(mass * np.float32(len(mass) / heads))
    return np.stack(masses)


def faded(ages: Positions | int, half_life: float) -> Mass:
    """float32[n]: how much a query counts when `ages` more tokens have come, half of it every `half_life`
    tokens (`RetentionConfig.half_life`); 1 at once."""
    return np.asarray(np.exp2(np.divide(ages, -half_life)), np.float32)


def rotated(queries: Rows, block: int) -> Rows:
    """The queries as llama.cpp rotates them before it multiplies them with quantized keys, which keeps
    their products (`src/llama-kv-cache.cpp`, attn_rot_k).

    queries: float32[..., head size]
    block: each `block` numbers, a power of two that divides the head size, are multiplied with the
        Walsh-Hadamard matrix over sqrt(block); 0: none are"""
    if not block:
        return queries
    signs = np.ones((1, 1), np.float32)
    while len(signs) < block:
        signs = np.block([[signs, signs], [signs, -signs]])
    parts = queries.reshape(*queries.shape[:-1], -1, block)
    turned: Rows = parts @ (signs / np.float32(np.sqrt(block)))
    return turned.reshape(queries.shape)
