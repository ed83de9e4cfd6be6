"""Rows of K on MLX arrays: a Metal kernel on Apple GPUs, plain MLX operations elsewhere.

MLX is lazy: arguments are checked at the call, work happens when the result is evaluated. Rows are
uint8 as everywhere in towerd, one row per position; `format` is a name of `formats.py`.

MLX rounds as the numpy reference does on its CPU backend; an Apple GPU flushes denormal floats to
zero, and is compiled with safe math and without contraction so that it otherwise rounds alike.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from towerd.kernels.mlx import metal as mlx_metal
from towerd.kernels.mlx import ops as mlx_ops
from towerd.kernels.reference import checks as checks
from towerd.kernels.reference.checks import Lines


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
    All other arguments: see `reference.rope_shift`. ValueError with an argument's name first."""
    _check_array(src, "src", mx.uint8)
    row = checks.check_format(format, "format")
    if not row.is_cache_type:
        raise ValueError(f"format: {row.name} is not a cache type")
    n_elements = checks.elements_of(row, src.shape[1], "src")
    _check_heads(n_elements, head_dim, n_rot, first, hadamard_block)
    checks.check_flag(neox, "neox")
    for table, name in ((cos, "cos"), (sin, "sin")):
        _check_array(table, name, mx.float32)
        if table.shape != (cos.shape[0], n_rot // 2) or not table.shape[0]:
            raise ValueError(f"{name}: expected shape (k, {n_rot // 2}), as many lines in both")
    lines = _checked_lines(row_table, src.shape[0], cos.shape[0])
    if src.size == 0:
        return src
    use_metal = has_apple_gpu() and mlx_metal.can_rope_shift(row, head_dim, hadamard_block)
    shift = mlx_metal.rope_shift if use_metal else mlx_ops.rope_shift
    return shift(src, row, cos, sin, lines, head_dim, n_rot, first, neox, hadamard_block)


def _check_array(value: object, name: str, dtype: mx.Dtype) -> None:
    if not isinstance(value, mx.array) or value.ndim != 2 or value.dtype != dtype:
        raise ValueError(f"{name}: expected an MLX array of 2 dimensions of {dtype}")


def _check_heads(
    n_elements: int, head_dim: int, n_rot: int, first: int, hadamard_block: int
) -> None:
    checks.check_int(head_dim, "head_dim", 2, n_elements)
    if n_elements % head_dim:
        raise ValueError(
            f"head_dim: a row of {n_elements} elements is not whole heads of {head_dim}"
        )
    checks.check_int(n_rot, "n_rot", 2, head_dim)
    if n_rot % 2:
        raise ValueError("n_rot: expected an even number")
    checks.check_int(first, "first", 0, head_dim - n_rot)
    if checks.check_int(hadamard_block, "hadamard_block", 0, 512):
        checks.check_block(hadamard_block, "hadamard_block")
        if head_dim % hadamard_block:
            raise ValueError(f"hadamard_block: {hadamard_block} does not divide head_dim")


def _checked_lines(row_table: Lines | None, n_rows: int, n_lines: int) -> mx.array:
    if row_table is None:
        return mx.zeros(n_rows, mx.int32)
    array = checks.array_of(row_table, "row_table", np.int32, 1)
    if len(array) != n_rows:
        raise ValueError(f"row_table: expected {n_rows} entries")
    if n_rows and (array.min() < -1 or array.max() >= n_lines):
        raise ValueError(f"row_table: a line is not in [-1, {n_lines})")
    return mx.array(array)
