"""Rotation of K rows by a position delta, in numpy."""

from __future__ import annotations

import numpy as np

from lab.reference.hadamard import transform
from lab.reference.transcode import decode, encode
from towerd.kernels.arrays import Bytes, Floats, Lines
from towerd.kernels.formats import BY_NAME


def rope_shift(
    src: Bytes,
    out: Bytes,
    format: str,
    cos: Floats,
    sin: Floats,
    row_table: Lines | None,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
    n_threads: int = 1,
) -> None:
    """See `dispatch.rope_shift`."""
    row = BY_NAME[format]
    lines = np.zeros(len(src), np.int32) if row_table is None else row_table
    moves = np.flatnonzero(lines >= 0)
    size, unit = row.block_bytes, max(row.block_elements, hadamard_block)
    runs = touched(row.n_elements(src.shape[1]), head_dim, n_rot, first, unit)
    parts = [slice(*(at // row.block_elements * size for at in run)) for run in runs]
    values = np.zeros((len(moves), row.n_elements(src.shape[1])), np.float32)
    for (begin, end), part in zip(runs, parts, strict=True):
        values[:, begin:end] = decode(row, src[moves, part])
    if row.is_quantized and not np.isfinite(values).all():
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        raise ValueError(f"src: row {moves[bad[0]]} is not finite")
    if hadamard_block:
        values = transform(values, hadamard_block)
    heads = values.reshape(len(values), values.shape[1] // head_dim, head_dim)
    _rotate(heads[:, :, first : first + n_rot], cos[lines[moves]], sin[lines[moves]], neox)
    out[:] = src
    for (begin, end), part in zip(runs, parts, strict=True):
        run = values[:, begin:end]
        out[moves, part] = encode(row, transform(run, hadamard_block) if hadamard_block else run)


def touched(
    n_elements: int, head_dim: int, n_rot: int, first: int, unit: int
) -> list[tuple[int, int]]:
    """Element runs [begin, end) of whole units (blocks of the format and of the Hadamard rotation)
    that hold rotated elements. Everything else is copied as bytes."""
    runs: list[tuple[int, int]] = []
    for head in range(0, n_elements, head_dim):
        begin = (head + first) // unit * unit
        end = -(-(head + first + n_rot) // unit) * unit
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _rotate(pairs: Floats, cos: Floats, sin: Floats, neox: bool) -> None:
    cos, sin = cos[:, None], sin[:, None]
    half = pairs.shape[2] // 2
    if neox:
        first, second = pairs[:, :, :half], pairs[:, :, half:]
    else:
        first, second = pairs[:, :, ::2], pairs[:, :, 1::2]
    a, b = first.copy(), second.copy()
    with np.errstate(all="ignore"):
        first[:] = a * cos - b * sin
        second[:] = b * cos + a * sin
