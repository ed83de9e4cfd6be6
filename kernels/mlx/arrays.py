"""Rows of K on MLX arrays: a Metal kernel on Apple GPUs, plain MLX operations elsewhere.

MLX is lazy: arguments are checked at the call, work happens when the result is evaluated. Rows are
uint8 as everywhere in towerd, one row per position; `format` is a name of `formats.py`.

MLX rounds as the numpy reference does on its CPU backend; an Apple GPU flushes denormal floats to
zero, and is compiled with safe math and without contraction so that it otherwise rounds alike.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy.typing as npt

from towerd.kernels.arrays import Lines
from towerd.kernels.mlx import metal as mlx_metal
from towerd.kernels.mlx import ops as mlx_ops
from towerd.kernels.mlx.arguments import (
    check_flag,
    check_format,
    check_heads,
    checked_lines,
    elements_of,
)


def has_apple_gpu() -> bool:
    """Whether Metal kernels run here and by default: an Apple GPU, not switched off for MLX."""
    return bool(mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu)


def share(memory: npt.NDArray[Any]) -> mx.array:
    """An MLX array of the same bytes, shape and strides.

    With Metal, memory that starts on a page of the system (16 KiB on Apple Silicon) is adopted
    without a copy: it stays alive with the array and must not change before results that need it
    are evaluated. Everything else is copied, and on other backends all memory is. The reverse never
    copies: `numpy.asarray(array)` is a view of MLX's memory (except bfloat16, which numpy
    lacks)."""
    return mx.asarray(memory)


def rope_shift(
    src: mx.array,
    format: str,
    cos: mx.array,
    sin: mx.array,
    row_table: Lines | None,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
) -> mx.array:
    """Rotate the RoPE pairs (a, b) of K rows: (a cos - b sin, b cos + a sin).

    src: uint8[n, row_bytes], whose scales are finite; returns the same shape
    cos, sin: float32[k, n_rot / 2], finite; row_table: int32[n] in numpy, because it is checked
    All other arguments: see `dispatch.rope_shift`. ValueError with an argument's name first."""
    _check_array(src, "src", mx.uint8)
    row = check_format(format, "format")
    if not row.is_cache_type:
        raise ValueError(f"format: {row.name} is not a cache type")
    n_elements = elements_of(row, src.shape[1], "src")
    check_heads(n_elements, head_dim, n_rot, first, hadamard_block)
    check_flag(neox, "neox")
    for table, name in ((cos, "cos"), (sin, "sin")):
        _check_array(table, name, mx.float32)
        if table.shape != (cos.shape[0], n_rot // 2) or not table.shape[0]:
            raise ValueError(f"{name}: expected shape (k, {n_rot // 2}), as many lines in both")
    lines = mx.array(checked_lines(row_table, src.shape[0], cos.shape[0]))
    if src.size == 0:
        return src
    use_metal = has_apple_gpu() and mlx_metal.can_rope_shift(row, head_dim, hadamard_block)
    shift = mlx_metal.rope_shift if use_metal else mlx_ops.rope_shift
    return shift(src, row, cos, sin, lines, head_dim, n_rot, first, neox, hadamard_block)


def _check_array(value: object, name: str, dtype: mx.Dtype) -> None:
    if not isinstance(value, mx.array) or value.ndim != 2 or value.dtype != dtype:
        raise ValueError(f"{name}: expected an MLX array of 2 dimensions of {dtype}")
