"""Rows of K in Metal kernels, for Apple GPUs.

The source of the kernels is in `shaders/`: one body per operation, which MLX compiles for the
template arguments given here, and shared headers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from towerd.kernels.formats import Format
from towerd.kernels.mlx.blocks import block_code

FOLDER = Path(__file__).parent / "shaders"
THREADS = 256
"""Threads of a threadgroup: kThreads of common.metal."""
TILE = 1024
"""About as many elements of a row as give a threadgroup enough to do."""
TILE_MAX = 8192
"""Floats in the 32 KiB of memory that every Apple GPU gives a threadgroup."""
RAW = {"f32": mx.uint32, "f16": mx.uint16, "bf16": mx.uint16}
KIND = {"f32": 0, "f16": 1, "bf16": 2}
"""KIND of elements.metal."""


@functools.cache
def kernel(name: str, inputs: tuple[str, ...], output: str, headers: tuple[str, ...]) -> Any:
    """MLX's handle of `shaders/NAME.metal`; each set of template arguments is compiled once."""
    return mx.fast.metal_kernel(
        name=f"towerd_{name}",
        input_names=list(inputs),
        output_names=[output],
        source=(FOLDER / f"{name}.metal").read_text(),
        header="".join((FOLDER / f"{header}.metal").read_text() for header in headers),
    )


def rope_shift(
    src: mx.array,
    format: Format,
    cos: mx.array,
    sin: mx.array,
    row_table: mx.array,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
) -> mx.array:
    """uint8[n, row_bytes], the rows of `src` rotated; see `dispatch.rope_shift`. `can_rope_shift` says
    which geometries fit."""
    heads = [("HEAD_DIM", head_dim), ("FIRST", first), ("N_ROT", n_rot), ("NEOX", neox)]
    inputs = ("src", "cos", "sin", "row_table")
    n = src.shape[0]
    if not format.is_quantized:
        run = kernel("rope_elements", inputs, "out", ("common", "elements"))
        raw = src.view(RAW[format.name])
        row = raw.shape[1]
        template = [("Raw", raw.dtype), ("KIND", KIND[format.name]), ("ROW", row), *heads]
        grid, group = (row, n, 1), (min(row, THREADS), 1, 1)
        out = _run(run, [raw, cos, sin, row_table], template, grid, group, raw.shape, raw.dtype)
        return out.view(mx.uint8)
    run = kernel("rope_blocks", inputs, "out", ("common", "encode"))
    row = format.n_elements(src.shape[1])
    tile = _tile(row, _unit(format, head_dim, hadamard_block))
    template = [
        *_code(format),
        *heads,
        ("HADAMARD", hadamard_block),
        ("TILE", tile),
        ("PARTS", row // tile),
    ]
    grid, group = (row // tile * THREADS, n, 1), (THREADS, 1, 1)
    return _run(run, [src, cos, sin, row_table], template, grid, group, src.shape, mx.uint8)


def can_rope_shift(format: Format, head_dim: int, hadamard_block: int) -> bool:
    """Whether there is a kernel: not for rotated rows that are not quantized, which only DeepSeek's
    indexer has, nor for heads of which no whole number fits into a threadgroup's memory."""
    if not format.is_quantized:
        return hadamard_block == 0
    return _unit(format, head_dim, hadamard_block) <= TILE_MAX


def _unit(format: Format, head_dim: int, hadamard_block: int) -> int:
    """Fewest elements that are whole heads, whole blocks and whole Hadamard runs."""
    return math.lcm(head_dim, format.block_elements, hadamard_block or 1)


def _tile(row: int, unit: int) -> int:
    """A divisor of the row in whole units, near TILE: enough work for a group's threads."""
    parts = range(1, row // unit + 1)
    fits = (row // n for n in parts if row % (n * unit) == 0 and row // n <= 2 * TILE)
    return next(fits, unit)


def _code(format: Format) -> list[tuple[str, Any]]:
    code = block_code(format)
    return [
        ("BITS", code.bits),
        ("ASYMMETRIC", code.asymmetric),
        ("TABLE", code.from_table),
        ("BLOCK_BYTES", format.block_bytes),
    ]


def _run(
    run: Any,
    inputs: list[mx.array],
    template: list[tuple[str, Any]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    shape: Sequence[int],
    dtype: mx.Dtype,
) -> mx.array:
    outputs = run(
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[tuple(shape)],
        output_dtypes=[dtype],
    )
    out: mx.array = outputs[0]
    return out
