"""The kernel that TOWERD_KERNELS=metal runs on an Apple GPU: numpy memory in, numpy memory out.

Same signature and checks as in C++. Input that starts on a page is read in place,
other input is copied once (`mlx.arrays.share`); the result is copied once into `out`, because MLX
allocates the memory that its kernels write. `n_threads` is only checked.
"""

from __future__ import annotations

import numpy as np

from towerd.kernels.arrays import Bytes, Floats, Lines
from towerd.kernels.mlx import arrays as mlx_arrays
from towerd.kernels.mlx.arguments import RopeShift, checked_rope_shift
from towerd.kernels.mlx.blocks import block_code

F16_EXPONENT = 0x7C00
"""All ones in an infinity or a NaN."""


def available() -> bool:
    """Whether MLX has an Apple GPU to run Metal kernels on."""
    return mlx_arrays.has_apple_gpu()


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
    _check_scales(shift)
    moved = mlx_arrays.rope_shift(
        mlx_arrays.share(shift.src),
        format,
        mlx_arrays.share(shift.cos),
        mlx_arrays.share(shift.sin),
        shift.row_table,
        head_dim,
        n_rot,
        first,
        neox,
        hadamard_block,
    )
    shift.out[:] = np.asarray(moved)


def _check_scales(shift: RopeShift) -> None:
    """ValueError if the scale of a block that is to be quantized again is not finite."""
    row = shift.format
    if not row.is_quantized:
        return
    moves = np.flatnonzero(shift.row_table >= 0)
    for begin, end in shift.touched():
        part = slice(begin // row.block_elements * row.block_bytes, row.row_bytes(end))
        blocks = shift.src[moves, part].reshape(len(moves), -1, row.block_bytes)
        header = np.ascontiguousarray(blocks[:, :, : block_code(row).header_bytes])
        infinite = (header.view(np.uint16) & F16_EXPONENT) == F16_EXPONENT
        bad = np.flatnonzero(infinite.any(axis=(1, 2)))
        if len(bad):
            raise ValueError(f"src: row {moves[bad[0]]} is not finite")
