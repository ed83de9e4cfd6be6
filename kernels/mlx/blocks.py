"""The block formats in plain MLX operations: 32 numbers to bytes and back.

Those that a llama.cpp cache has. All round as the C++ does, operation by operation.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import mlx.core as mx

from towerd.kernels.formats import Format

BLOCK = 32
LEVELS = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
"""What the codes of iq4_nl stand for."""
IQ4_NL_LEAST = 1e-15


@dataclass(frozen=True, slots=True)
class CacheCode:
    """The block code of a cache type: an f16 scale, perhaps an f16 minimum, then codes of `bits`."""

    bits: int
    asymmetric: bool = False
    from_table: bool = False
    """Codes are numbers of LEVELS."""


CODES = {
    "q4_0": CacheCode(4),
    "q4_1": CacheCode(4, asymmetric=True),
    "q5_0": CacheCode(5),
    "q5_1": CacheCode(5, asymmetric=True),
    "q8_0": CacheCode(8),
    "iq4_nl": CacheCode(4, from_table=True),
}
"""What each means is in ggml/src/ggml-quants.c."""


def block_code(format: Format) -> CacheCode:
    """The code of a quantized cache type."""
    return CODES[format.name]


def decode_blocks(blocks: mx.array, code: CacheCode) -> mx.array:
    """uint8[n, block_bytes] to float32[n, 32]."""
    scale = blocks[:, :2].view(mx.float16).astype(mx.float32)
    codes = _unpack(blocks[:, 4 if code.asymmetric else 2 :], code.bits)
    if code.from_table:
        return scale * mx.array(LEVELS)[codes]
    if code.asymmetric:
        minimum = blocks[:, 2:4].view(mx.float16).astype(mx.float32)
        return scale * codes.astype(mx.float32) + minimum
    if code.bits == 8:
        return scale * codes.view(mx.int8).astype(mx.float32)
    return scale * (codes.astype(mx.float32) - 2.0 ** (code.bits - 1))


def encode_blocks(values: mx.array, code: CacheCode) -> mx.array:
    """float32[n, 32] to uint8[n, block_bytes], as ggml-cpu's from_float of a cache type."""
    if code.from_table:
        return _encode_table(values)
    if code.asymmetric:
        return _encode_asymmetric(values, code.bits)
    if code.bits == 8:
        return _encode_bytes(values)
    return _encode_symmetric(values, code.bits)


def _unpack(body: mx.array, bits: int) -> mx.array:
    """Codes as uint8[n, 32]."""
    if bits == 8:
        return body
    nibbles = body[:, -16:]
    codes = mx.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    if bits == 5:
        high = body[:, :4, None] >> mx.arange(8, dtype=mx.uint8) & 1
        codes = codes | high.reshape(-1, BLOCK) << 4
    return codes


def _block(header: list[mx.array], codes: mx.array, bits: int) -> mx.array:
    """uint8[n, block_bytes] of f16 numbers and codes of 4, 5 or 8 bits, as in caches."""
    numbers = [number.astype(mx.float16).view(mx.uint8) for number in header]
    if bits == 8:
        return mx.concatenate([*numbers, codes.astype(mx.int8).view(mx.uint8)], axis=1)
    codes = codes.astype(mx.uint8)
    nibbles = codes[:, :16] & 15 | codes[:, 16:] << 4
    if bits == 4:
        return mx.concatenate([*numbers, nibbles], axis=1)
    high = (codes >> 4).reshape(-1, 4, 8) << mx.arange(8, dtype=mx.uint8)
    return mx.concatenate([*numbers, high.sum(axis=2).astype(mx.uint8), nibbles], axis=1)


def _inverse(numerator: float, numbers: mx.array) -> mx.array:
    return mx.where(numbers == 0, 0.0, numerator / numbers)


def _leading(values: mx.array) -> mx.array:
    """The first number of the largest magnitude of each block; +0 where all are zero."""
    at = mx.argmax(mx.abs(values), axis=1, keepdims=True)
    found = mx.take_along_axis(values, at, axis=1)
    return mx.where(found == 0, 0.0, found)


def _encode_bytes(values: mx.array) -> mx.array:
    largest = mx.abs(values).max(axis=1, keepdims=True)
    codes = mx.round(values * _inverse(127.0, largest))
    return _block([largest / 127.0], codes, 8)


def _encode_symmetric(values: mx.array, bits: int) -> mx.array:
    half = 1 << (bits - 1)
    step = _leading(values) / -half
    codes = (values * _inverse(1.0, step) + (half + 0.5)).astype(mx.int32)
    return _block([step], mx.minimum(codes, 2 * half - 1), bits)


def _encode_asymmetric(values: mx.array, bits: int) -> mx.array:
    top = (1 << bits) - 1
    low = mx.take_along_axis(values, mx.argmin(values, axis=1, keepdims=True), axis=1)
    step = (values.max(axis=1, keepdims=True) - low) / top
    codes = ((values - low) * _inverse(1.0, step) + 0.5).astype(mx.int32)
    return _block([step, low], mx.minimum(codes, top), bits)


def _encode_table(values: mx.array) -> mx.array:
    lead = _leading(values)
    usable = mx.abs(lead) >= IQ4_NL_LEAST
    scaled = values * (1.0 / (lead / LEVELS[0]))
    codes = mx.zeros(values.shape, mx.int32)
    for lower, upper in itertools.pairwise(LEVELS):
        codes = codes + (scaled >= (lower + upper) / 2).astype(mx.int32)
    weight, looked_up = values * values, mx.array(LEVELS)[codes]
    product, square = _sum(weight * looked_up * values), _sum(weight * looked_up * looked_up)
    step = mx.where(usable & (square > 0), product / square, 0.0)
    return _block([step], mx.where(usable, codes, 8), 4)


def _sum(values: mx.array) -> mx.array:
    """Sums of each block from left to right, the order that ggml rounds in."""
    total = values[:, :1]
    for i in range(1, BLOCK):
        total = total + values[:, i : i + 1]
    return total
