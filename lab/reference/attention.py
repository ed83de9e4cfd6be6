"""Attention mass of cached keys, in numpy."""

from __future__ import annotations

import numpy as np

from lab.reference.transcode import decode
from towerd.kernels.arrays import Bytes, Floats, Index
from towerd.kernels.formats import BY_NAME

F32_MAX = float(np.finfo(np.float32).max)


def attention_mass(
    queries: Floats,
    keys: Bytes,
    format: str,
    n_seen: Index,
    head_dim: int,
    scale: float,
    n_threads: int = 1,
    sinks: Floats | None = None,
    weights: Floats | None = None,
) -> Floats:
    """See `dispatch.attention_mass`."""
    m, n = len(queries), len(keys)
    _check_finite(queries, "queries")
    values = decode(BY_NAME[format], keys)
    _check_finite(values, "keys")
    hidden = np.arange(n)[None, :] >= n_seen[:, None]
    n_heads, n_kv_heads = queries.shape[1] // head_dim, values.shape[1] // head_dim
    group = n_heads // n_kv_heads
    total = np.zeros((n_kv_heads, n), np.float64)
    heads = queries.reshape(m, n_heads, head_dim).astype(np.float64)
    kv_heads = values.reshape(n, n_kv_heads, head_dim).astype(np.float64)
    for head in range(n_heads if m else 0):
        dots = heads[:, head] @ kv_heads[:, head // group].T
        scores = dots * np.float64(np.float32(scale))
        if (np.maximum(np.abs(dots), np.abs(scores)) * ~hidden > F32_MAX).any():
            raise ValueError("queries: a score is beyond what float32 holds")
        scores[hidden] = -np.inf
        if sinks is not None:
            scores = np.append(scores, np.full((m, 1), np.float64(sinks[head])), axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = powers / powers.sum(axis=1, keepdims=True)
        if weights is not None:
            shares *= weights[:, None].astype(np.float64)
        total[head // group] += shares[:, :n].sum(axis=0)
    return total.astype(np.float32)


def _check_finite(rows: Floats, name: str) -> None:
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(bad):
        raise ValueError(f"{name}: row {bad[0]} is not finite")
