"""Attention mass of cached keys, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.reference.transcode import decode
from towerd.kernels.arrays import Bytes, Floats, Index
from towerd.kernels.formats import Format
from towerd.kernels.mlx import arguments

HEAD_DIM_MAX = 1024
F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class _Attention:
    """The checked arguments."""

    queries: Floats
    keys: Bytes
    format: Format
    n_seen: Index
    head_dim: int
    scale: float


def attention_mass(
    queries: Floats,
    keys: Bytes,
    format: str,
    n_seen: Index,
    head_dim: int,
    scale: float,
    n_threads: int = 1,
) -> Floats:
    """See `dispatch.attention_mass`."""
    work = _checked(queries, keys, format, n_seen, head_dim, scale, n_threads)
    m, n = len(work.queries), len(work.keys)
    _check_finite(work.queries, "queries")
    values = decode(work.format, work.keys)
    _check_finite(values, "keys")
    total = np.zeros(n, np.float64)
    hidden = np.arange(n)[None, :] >= work.n_seen[:, None]
    n_heads, n_kv_heads = work.queries.shape[1] // head_dim, values.shape[1] // head_dim
    heads = work.queries.reshape(m, n_heads, head_dim).astype(np.float64)
    kv_heads = values.reshape(n, n_kv_heads, head_dim).astype(np.float64)
    for head in range(n_heads if m else 0):
        dots = heads[:, head] @ kv_heads[:, head // (n_heads // n_kv_heads)].T
        scores = dots * np.float64(np.float32(scale))
        if (np.maximum(np.abs(dots), np.abs(scores)) * ~hidden > F32_MAX).any():
            raise ValueError("queries: a score is beyond what float32 holds")
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    return total.astype(np.float32)


def _check_finite(rows: Floats, name: str) -> None:
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(bad):
        raise ValueError(f"{name}: row {bad[0]} is not finite")


def _checked(
    queries: Floats,
    keys: Bytes,
    format: str,
    n_seen: Index,
    head_dim: int,
    scale: float,
    n_threads: int,
) -> _Attention:
    arguments.check_threads(n_threads)
    query_rows: Floats = arguments.rows_of(queries, "queries", np.float32)
    if not query_rows.flags.aligned:
        raise ValueError("queries: not aligned")
    key_rows: Bytes = arguments.rows_of(keys, "keys")
    row = arguments.check_format(format, "format")
    if row.is_quantized:
        raise ValueError(f"format: {row.name} is quantized")
    arguments.check_int(head_dim, "head_dim", 1, HEAD_DIM_MAX)
    n_heads = _heads_of(query_rows.shape[1], head_dim, "queries")
    n_elements = arguments.elements_of(row, key_rows.shape[1], "keys")
    n_kv_heads = _heads_of(n_elements, head_dim, "keys")
    if n_heads % n_kv_heads:
        raise ValueError(f"queries: {n_heads} heads cannot share {n_kv_heads} KV heads")
    _check_scale(scale)
    seen = arguments.array_of(n_seen, "n_seen", np.int64, 1)
    arguments.check_contiguous(seen, "n_seen")
    if len(seen) != len(query_rows):
        raise ValueError(f"n_seen: expected {len(query_rows)} entries")
    if len(seen) and (seen.min() < 1 or seen.max() > len(key_rows)):
        raise ValueError(f"n_seen: a query sees other than 1 to {len(key_rows)} keys")
    return _Attention(query_rows, key_rows, row, seen, head_dim, scale)


def _check_scale(value: object) -> None:
    if not (isinstance(value, float) and abs(value) <= F32_MAX):
        raise ValueError("scale: expected a finite float32")


def _heads_of(n_elements: int, head_dim: int, name: str) -> int:
    if n_elements == 0 or n_elements % head_dim:
        raise ValueError(f"{name}: a row of {n_elements} elements is not whole heads of {head_dim}")
    return n_elements // head_dim
