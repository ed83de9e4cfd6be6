"""Block-32 quantization in numpy: what each block code means, to the byte.

A block is 32 numbers: an f16 scale, with asymmetric codes an f16 minimum, then the codes. Codes of
`bits` bits are stored as high bits (5: one bit per element, 6: two), then 16 bytes whose low
nibbles are elements 0 to 15 and whose high nibbles are elements 16 to 31. Symmetric codes mean
(code - 2^(bits-1)) * scale, asymmetric ones code * scale + minimum; 8-bit symmetric codes are
signed bytes; iq4_nl looks its codes up in a table.

ggml's codes (q8_0 q5_0 q5_1 q4_0 q4_1 iq4_nl) are written as its x86 CPU backend writes its cache
(ggml-cpu's from_float, source: ggml/src/ggml-quants.c and ggml-cpu/arch/x86/quants.c): q8_0 rounds
ties to even, iq4_nl does not search its scale. The stored codes (q8 q6 q5 q4 q8a q6a q5a q4a) are
towerd's; q8 and q6 keep every error within half a step, q5 and q4 try scales and keep the one with
the least squared error.

Everything is float32 with one rounding per operation and sums in a fixed order: the
C++ versions (cpp/blocks-inl.h) do the same operations and give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Codes: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Encoded: TypeAlias = tuple[Floats, Floats, Codes]
"""Scale f32[b], minimum f32[b] (unused by symmetric codes), codes int32[b, 32]."""
F32 = np.float32

BLOCK = 32
F16_MAX = F32(65504)
LEAST = F32(2**-25)
"""Half of the smallest f16: numbers below it round to zero at any scale."""
IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
IQ4_NL_LEAST = F32(1e-15)
WIDER = np.array([0, *(i * 0.375 for i in range(-3, 4))], np.float32)
"""Of the scales that the search tries; the first is the plain one, which is exact for the extremes.
Symmetric: by how many codes more than `half` the largest number is stretched, then clipped."""
BELOW = np.array([0, -0.25, 0, 0.25, 0.25, 0, 0.5, -0.25], np.float32)
ABOVE = np.array([0, 0.25, -0.25, 0.25, -0.5, 0.5, 0, 0], np.float32)
"""Asymmetric: by how many codes the numbers are stretched below 0 and above the top code. Chosen
greedily for the least error on normal and Laplace numbers, at 4 and 5 bits."""


@dataclass(frozen=True, slots=True)
class BlockCode:
    """One block code: how many bits, with a minimum or not, and how codes are found."""

    bits: int
    asymmetric: bool
    encode: Callable[[Floats, int], Encoded]
    """Takes values f32[b, 32] and bits."""
    table: Floats | None = None

    @property
    def header_bytes(self) -> int:
        """Bytes of scale and minimum."""
        return 4 if self.asymmetric else 2

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 32 numbers."""
        return self.header_bytes + 4 * self.bits


def decode_blocks(codec: str, rows: Bytes) -> Floats:
    """The numbers that blocks stand for.

    codec: a name of CODES; rows: uint8[n, whole blocks], returns f32[n, elements].
    ValueError for an unknown codec or rows that are not whole blocks."""
    code = _code(codec)
    if rows.ndim != 2 or rows.shape[1] % code.block_bytes:
        raise ValueError(f"rows: not 2 dimensions of whole {codec} blocks")
    blocks = np.ascontiguousarray(rows).reshape(-1, code.block_bytes)
    header = np.ascontiguousarray(blocks[:, : code.header_bytes]).view(np.float16)
    codes = _unpack(blocks[:, code.header_bytes :], code.bits)
    with np.errstate(all="ignore"):  # blocks may hold any bytes
        scale = header[:, :1].astype(np.float32)
        if code.table is not None:
            values = scale * code.table[codes]
        elif code.asymmetric:
            values = codes.astype(np.float32) * scale + header[:, 1:].astype(np.float32)
        else:
            half = 1 << (code.bits - 1)
            signed = (codes ^ half if code.bits == 8 else codes) - half
            values = signed.astype(np.float32) * scale
    return values.reshape(len(rows), rows.shape[1] // code.block_bytes * BLOCK)


def encode_blocks(codec: str, values: Floats) -> Bytes:
    """The blocks of finite numbers.

    codec: a name of CODES; values: f32[n, whole blocks of 32], returns uint8[n, bytes].
    Stored codes saturate: a scale or minimum never exceeds what f16 holds. ggml's become infinite
    as ggml's do. ValueError for an unknown codec or values of another type or shape."""
    code = _code(codec)
    if values.dtype != np.float32 or values.ndim != 2 or values.shape[1] % BLOCK:
        raise ValueError(f"values: not float32 of 2 dimensions in whole blocks of {BLOCK}")
    with np.errstate(all="ignore"):  # infinite steps are meant, see the encoders
        scale, minimum, codes = code.encode(values.reshape(-1, BLOCK), code.bits)
        header = np.stack([scale, minimum], 1)[:, : code.header_bytes // 2].astype(np.float16)
    blocks = np.concatenate([header.view(np.uint8), _pack(codes, code.bits)], 1)
    return blocks.reshape(len(values), values.shape[1] // BLOCK * code.block_bytes)


def _code(codec: str) -> BlockCode:
    if codec not in CODES:
        raise ValueError(f"codec: {codec!r} is not one of {', '.join(CODES)}")
    return CODES[codec]


def _unpack(body: Bytes, bits: int) -> Codes:
    if bits == 8:
        return body.astype(np.int32)
    nibbles = body[:, -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], 1).astype(np.int32)
    if bits == 5:
        codes |= np.unpackbits(body[:, :4], axis=1, bitorder="little").astype(np.int32) << 4
    if bits == 6:  # byte j: elements j, j + 8, j + 16, j + 24
        high = body[:, None, :8] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        codes |= high.reshape(-1, BLOCK).astype(np.int32) << 4
    return codes


def _pack(codes: Codes, bits: int) -> Bytes:
    body = codes.astype(np.uint8)
    if bits == 8:
        return body
    nibbles = body[:, :16] & np.uint8(15) | body[:, 16:] << np.uint8(4)
    if bits == 5:
        return np.concatenate([np.packbits(body >> 4, axis=1, bitorder="little"), nibbles], 1)
    if bits == 6:
        high = (body >> 4).reshape(-1, 4, 8) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        return np.concatenate([np.bitwise_or.reduce(high, 1), nibbles], 1)
    return nibbles


def _reciprocal(step: Floats) -> Floats:
    return np.where(step != 0, F32(1) / step, F32(0))


def _leading(values: Floats) -> Floats:
    """Per block, the first number with the largest magnitude; +0 if all are zero."""
    at = np.abs(values).argmax(1)
    found: Floats = values[np.arange(len(values)), at]
    return np.where(found == 0, F32(0), found)


def _first_minimum(values: Floats) -> Floats:
    """Per block, the smallest number; of +0 and -0, the first one."""
    at = (values == values.min(1)[:, None]).argmax(1)
    found: Floats = values[np.arange(len(values)), at]
    return found


# ggml's codes. Where 1 / step overflows (a step below 2^-128), its conversion of an infinite
# float to an integer gives the smallest integer, of which it keeps the low bits or saturates.


def _ggml_symmetric(values: Floats, bits: int) -> Encoded:
    half = 1 << (bits - 1)
    step = _leading(values) / F32(-half)
    scaled = values * _reciprocal(step)[:, None] + F32(half + 0.5)
    return step, step, _truncated(scaled, 2 * half - 1)


def _ggml_asymmetric(values: Floats, bits: int) -> Encoded:
    top = (1 << bits) - 1
    low = _first_minimum(values)
    step = (values.max(1) - low + F32(0)) / F32(top)
    scaled = (values - low[:, None]) * _reciprocal(step)[:, None] + F32(0.5)
    return step, low, _truncated(scaled, top)


def _truncated(scaled: Floats, top: int) -> Codes:
    usable = np.isfinite(scaled)
    codes = np.minimum(np.where(usable, scaled, F32(0)), F32(top)).astype(np.int32)
    return np.where(usable.all(1, keepdims=True), codes, 0)


def _ggml_q8_0(values: Floats, bits: int) -> Encoded:
    del bits
    largest = np.abs(values).max(1)
    inverse = np.where(largest != 0, F32(127) / largest, F32(0))
    step = largest / F32(127)
    codes = np.rint(values * np.where(np.isfinite(inverse), inverse, F32(0))[:, None])
    return step, step, np.where(np.isfinite(inverse)[:, None], codes, -128).astype(np.int32) & 255


def _ggml_iq4_nl(values: Floats, bits: int) -> Encoded:
    del bits
    lead = _leading(values)
    usable = np.abs(lead) >= IQ4_NL_LEAST
    inverse = F32(1) / (lead / IQ4_NL[0])
    between = (IQ4_NL[:-1] + IQ4_NL[1:]) / F32(2)
    codes = np.searchsorted(between, inverse[:, None] * values, side="right").astype(np.int32)
    weight, looked_up = values * values, IQ4_NL[codes]
    product = _sum(weight * looked_up * values)
    square = _sum(weight * looked_up * looked_up)
    step = np.where(usable & (square > 0), product / square, F32(0))
    # where ggml sets no codes, these are the codes of the number nearest to zero
    return step, step, np.where(usable[:, None], codes, 8)


def _sum(terms: Floats) -> Floats:
    """Sums along axis 1, from the first element to the last."""
    total = np.zeros_like(terms[:, 0])
    for j in range(terms.shape[1]):
        total = total + terms[:, j]
    return total


def _sum_of_halves(terms: Floats) -> Floats:
    """As `_sum`, elements 0 to 15 and 16 to 31 on their own, then both together."""
    return _sum(terms[:, : BLOCK // 2]) + _sum(terms[:, BLOCK // 2 :])


# The stored codes


def _to_f16(numbers: Floats) -> Floats:
    """Rounded to the nearest f16 that is finite."""
    return np.clip(numbers, -F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)


def _above(number: Floats, least: Floats) -> Floats:
    """`number` (f16, not negative), or the next f16 where it is less than `least`."""
    half = number.astype(np.float16)
    up = np.minimum(np.nextafter(half, np.float16(np.inf)), np.float16(F16_MAX))
    return np.where(number < least, up, half).astype(np.float32)


def _below(numbers: Floats) -> Floats:
    """The largest f16 that is not above each number; saturated."""
    nearest = numbers.astype(np.float16)
    down = np.nextafter(nearest, np.float16(-np.inf))
    low = np.where(nearest.astype(np.float32) > numbers, down, nearest)
    return np.maximum(low.astype(np.float32), -F16_MAX)


def _nearest(scaled: Floats, low: int, high: int) -> Codes:
    return np.rint(np.clip(scaled, F32(low), F32(high))).astype(np.int32)


def _symmetric(values: Floats, bits: int) -> Encoded:
    """The smallest step with which no number is more than half a step from its code.

    The larger side takes the codes down to -half, so the scale is negative if that is the
    positive side. Zeros of either sign count as +0 here and in the other stored codes."""
    half = 1 << (bits - 1)
    low, high = values.min(1), values.max(1)
    flip = (high >= -low) & (high > 0)
    lead, other = np.maximum(-low, high), np.minimum(-low, high)
    bound = other * F32(1 / (half - 0.5))
    step = _to_f16(np.maximum(lead * F32(1 / half), bound))
    step = _above(step, np.maximum(lead * F32(1 / (half + 0.5)), bound))
    scale = np.where(flip & (step != 0), -step, np.abs(step))
    codes = _nearest(values * _reciprocal(scale)[:, None], -half, half - 1)
    return scale, scale, (codes + (half if bits < 8 else 0)) & (2 * half - 1)


def _asymmetric(values: Floats, bits: int) -> Encoded:
    """The minimum rounded down, and a step with which no number is more than half a step off."""
    top = (1 << bits) - 1
    minimum = _below(values.min(1)) + F32(0)
    extent = values.max(1) - minimum + F32(0)
    step = _above(_to_f16(extent * F32(1 / top)), extent * F32(1 / (top + 0.5)))
    scaled = (values - minimum[:, None]) * _reciprocal(step)[:, None]
    return step, minimum, _nearest(scaled, 0, top)


def _where(mask: npt.NDArray[np.bool_], yes: Encoded, no: Encoded) -> Encoded:
    return (
        np.where(mask, yes[0], no[0]),
        np.where(mask, yes[1], no[1]),
        np.where(mask[:, None], yes[2], no[2]),
    )


def _search_symmetric(values: Floats, bits: int) -> Encoded:
    """The best of 8 scales: ggml's, and the least-squares ones for the codes that 7 steps around
    it give; each is judged as it will be stored, in f16. The codes are then the nearest ones.
    Numbers too small or too large for a search are encoded by `_symmetric`."""
    half = 1 << (bits - 1)
    lead = _leading(values)
    inverse = F32(1) / lead
    stretch = F32(-half) - WIDER
    number = (values * inverse[:, None])[:, :, None]
    code = np.rint(np.clip(number * stretch, F32(-half), F32(half - 1)))
    product, square = _sum_of_halves(code * number), _sum_of_halves(code * code)
    step = product / square
    step[:, 0] = F32(-1 / half)
    scales = _to_f16(step * lead[:, None])
    stored = scales * inverse[:, None]
    gain = stored * (product + product - stored * square)
    scale = scales[np.arange(len(values)), gain.argmax(1)]
    codes = _nearest(values * _reciprocal(scale)[:, None], -half, half - 1)
    searched = (np.abs(lead) >= LEAST) & (np.abs(lead) <= F16_MAX * half)
    return _where(searched, (scale, scale, codes + half), _symmetric(values, bits))


def _search_asymmetric(values: Floats, bits: int) -> Encoded:
    """As `_search_symmetric`, with the least-squares minimum of each rounded scale."""
    top = (1 << bits) - 1
    low = values.min(1) + F32(0)
    extent = values.max(1) - low
    inverse = F32(1) / extent
    stretch = F32(top) + (BELOW + ABOVE)
    number = ((values - low[:, None]) * inverse[:, None])[:, :, None]
    code = np.rint(np.clip(number * stretch - BELOW, F32(0), F32(top)))
    total, count = _sum_of_halves(number), _sum_of_halves(code)
    product, square = _sum_of_halves(code * number), _sum_of_halves(code * code)
    step = (F32(BLOCK) * product - count * total) / (F32(BLOCK) * square - count * count)
    step[:, 0] = F32(1 / top)
    scales = _to_f16(step * extent[:, None])
    stored = scales * inverse[:, None]
    shift = (total - stored * count) * F32(1 / BLOCK)
    shift[:, 0] = 0
    minima = _to_f16(low[:, None] + shift * extent[:, None])
    moved = (minima - low[:, None]) * inverse[:, None]
    gain = stored * (product + product - stored * square - (moved + moved) * count)
    gain = gain + moved * (total + total - F32(BLOCK) * moved)
    best = np.arange(len(values)), gain.argmax(1)
    scale, minimum = scales[best], minima[best]
    codes = _nearest((values - minimum[:, None]) * _reciprocal(scale)[:, None], 0, top)
    searched = (extent >= LEAST) & (extent <= 2 * F16_MAX)
    return _where(searched, (scale, minimum, codes), _asymmetric(values, bits))


CODES: dict[str, BlockCode] = {
    "q4_0": BlockCode(4, False, _ggml_symmetric),
    "q4_1": BlockCode(4, True, _ggml_asymmetric),
    "q5_0": BlockCode(5, False, _ggml_symmetric),
    "q5_1": BlockCode(5, True, _ggml_asymmetric),
    "q8_0": BlockCode(8, False, _ggml_q8_0),
    "iq4_nl": BlockCode(4, False, _ggml_iq4_nl, IQ4_NL),
    "q8": BlockCode(8, False, _symmetric),
    "q6": BlockCode(6, False, _symmetric),
    "q5": BlockCode(5, False, _search_symmetric),
    "q4": BlockCode(4, False, _search_symmetric),
    "q8a": BlockCode(8, True, _asymmetric),
    "q6a": BlockCode(6, True, _asymmetric),
    "q5a": BlockCode(5, True, _search_asymmetric),
    "q4a": BlockCode(4, True, _search_asymmetric),
}
