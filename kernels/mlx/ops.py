"""Rows of K in plain MLX operations, for machines where MLX has no Metal.

`mlx.kernels` checks all arguments and chooses between this module and `mlx.metal`.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from towerd.kernels.formats import Format
from towerd.kernels.mlx.blocks import block_code, decode_blocks, encode_blocks

ELEMENT_TYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def hadamard(x: mx.array, block: int) -> mx.array:
    """float32[n, d]: each run of `block` numbers times the Walsh-Hadamard matrix / sqrt(block), its
    own inverse. Scaled first, as all kernels do, so that results round alike."""
    scale = float(np.float32(1.0) / np.sqrt(np.float32(block)))
    runs = (x * scale).reshape(-1, block)
    return mx.hadamard_transform(runs, scale=1.0).reshape(x.shape)


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
    """See `mlx.metal.rope_shift`."""
    values = _decode(src, format)
    n, d = values.shape
    if hadamard_block:
        values = hadamard(values, hadamard_block)
    lines = mx.maximum(row_table, 0)
    heads = values.reshape(n, d // head_dim, head_dim)
    turned = _rotate(
        heads[:, :, first : first + n_rot], cos[lines][:, None], sin[lines][:, None], neox
    )
    heads = mx.concatenate([heads[:, :, :first], turned, heads[:, :, first + n_rot :]], axis=2)
    values = heads.reshape(n, d)
    if hadamard_block:
        values = hadamard(values, hadamard_block)
    touched = _touched(d // head_dim, head_dim, n_rot, first, format, hadamard_block)
    is_new = (row_table >= 0)[:, None] & mx.array(np.repeat(touched, format.block_bytes))
    return mx.where(is_new, _encode(values, format), src)


def _rotate(part: mx.array, cos: mx.array, sin: mx.array, neox: bool) -> mx.array:
    half = part.shape[2] // 2
    if neox:
        a, b = part[:, :, :half], part[:, :, half:]
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
    a, b = part[:, :, 0::2], part[:, :, 1::2]
    return mx.stack([a * cos - b * sin, b * cos + a * sin], axis=3).reshape(part.shape)


def _touched(
    n_heads: int, head_dim: int, n_rot: int, first: int, format: Format, hadamard_block: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which blocks of a row hold, or share a Hadamard run with, a rotated element."""
    rotated = np.zeros((n_heads, head_dim), np.bool_)
    rotated[:, first : first + n_rot] = True
    unit = math.lcm(format.block_elements, hadamard_block or 1)
    per_unit = rotated.reshape(-1, unit).any(axis=1)
    return np.repeat(per_unit, unit // format.block_elements)


def _decode(src: mx.array, format: Format) -> mx.array:
    """uint8[n, row_bytes] to float32[n, d], without undoing a Hadamard rotation."""
    if not format.is_quantized:
        return src.view(ELEMENT_TYPES[format.name]).astype(mx.float32)
    blocks = src.reshape(-1, format.block_bytes)
    return decode_blocks(blocks, block_code(format)).reshape(src.shape[0], -1)


def _encode(values: mx.array, format: Format) -> mx.array:
    if not format.is_quantized:
        return values.astype(ELEMENT_TYPES[format.name]).view(mx.uint8)
    blocks = encode_blocks(values.reshape(-1, format.block_elements), block_code(format))
    return blocks.reshape(values.shape[0], -1)
