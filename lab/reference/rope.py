"""Rotation of K rows by a position delta, in numpy."""

from __future__ import annotations

import numpy as np

from lab.reference.hadamard import transform
from lab.reference.transcode import decode, encode
from towerd.kernels.arrays import Bytes, Floats, Index, Lines
from towerd.kernels.mlx.arguments import RopeShift, checked_rope_shift


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
    shift = checked_rope_shift(
        src,
        out,
        format,
        cos,
        sin,
        row_table,
        head_dim,
        n_rot,
        first,
        neox,
        hadamard_block,
        n_threads,
    )
    moves = np.flatnonzero(shift.row_table >= 0)
    values = _load(shift, moves)
    _rotate(shift, values, shift.row_table[moves])
    shift.out[:] = shift.src
    for begin, end in shift.touched():
        run = values[:, begin:end]
        if shift.hadamard_block:
            run = transform(run, shift.hadamard_block)
        shift.out[moves, shift.bytes_of(begin, end)] = encode(shift.format, run)


def _load(shift: RopeShift, moves: Index) -> Floats:
    """float32[moves, n_elements], zeros where no rotated element is near."""
    values = np.zeros((len(moves), shift.n_elements), np.float32)
    for begin, end in shift.touched():
        values[:, begin:end] = decode(shift.format, shift.src[moves, shift.bytes_of(begin, end)])
    if shift.format.is_quantized:
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            raise ValueError(f"src: row {moves[bad[0]]} is not finite")
    if shift.hadamard_block:
        values = transform(values, shift.hadamard_block)
    return values


def _rotate(shift: RopeShift, values: Floats, lines: Lines) -> None:
    cos, sin = shift.cos[lines][:, None], shift.sin[lines][:, None]
    heads = values.reshape(len(values), shift.n_elements // shift.head_dim, shift.head_dim)
    pairs = heads[:, :, shift.first : shift.first + shift.n_rot]
    half = shift.n_rot // 2
    if shift.neox:
        first, second = pairs[:, :, :half], pairs[:, :, half:]
    else:
        first, second = pairs[:, :, ::2], pairs[:, :, 1::2]
    a, b = first.copy(), second.copy()
    with np.errstate(all="ignore"):
        first[:] = a * cos - b * sin
        second[:] = b * cos + a * sin
