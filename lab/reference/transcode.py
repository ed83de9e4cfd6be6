"""Rows from one format into another, in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.reference.blocks import decode_blocks, encode_blocks
from lab.reference.hadamard import transform
from towerd.kernels.arrays import Bytes, Floats, TranscodeJob
from towerd.kernels.formats import BY_NAME, Format

F16_MAX = np.float32(65504)


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Two formats that hold rows of `n_elements`."""

    source: Format
    target: Format
    n_elements: int

    def apply(self, rows: Bytes) -> Bytes:
        """The rows in the target's format; ValueError names the first that it cannot hold."""
        if self.source is self.target:
            return rows
        values = decode(self.source, rows)
        block = self.source.hadamard_block(self.n_elements)
        rotated = self.target.hadamard_block(self.n_elements)
        if block and not rotated:
            values = transform(values, block)
        if self.target.is_quantized:
            _check_range(values, 0 if block else rotated)
        if rotated and not block:
            values = transform(values, rotated)
        return encode(self.target, values)


def _check_range(values: Floats, rotated: int) -> None:
    limit = F16_MAX / np.float32(math.sqrt(rotated or 1))
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(~(np.abs(values) <= limit).all(axis=1))
    if len(bad):
        row = f"rows: row {bad[0]}"
        if np.isfinite(values[bad[0]]).all():
            raise ValueError(f"{row} has a number beyond +-{limit:.0f}")
        raise ValueError(f"{row} is not finite")


def transcode(
    dst: Any, jobs: Sequence[TranscodeJob], n_threads: int = 1, is_new: bool = False
) -> None:
    """See `dispatch.transcode`."""
    for offset, rows, index, src_format, dst_format in jobs:
        taken = rows if index is None else rows[index]
        written = transcoded(taken, src_format, dst_format).reshape(-1)
        dst[offset : offset + len(written)] = written


def transcoded(rows: Bytes, src_format: str, dst_format: str, n_threads: int = 1) -> Bytes:
    """See `dispatch.transcoded`."""
    source, target = BY_NAME[src_format], BY_NAME[dst_format]
    conversion = _Conversion(source, target, source.n_elements(rows.shape[1]))
    return np.array(conversion.apply(rows), order="C")


def decode(row: Format, rows: Bytes) -> Floats:
    """float32[n, elements] of uint8[n, row_bytes], without the Hadamard rotation."""
    if row.is_quantized:
        return decode_blocks(row.codec, rows)
    tight = np.ascontiguousarray(rows)
    if row.name == "f32":
        return tight.view(np.float32)
    if row.name == "bf16":
        return (tight.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    halves = tight.view(np.uint16)
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaNs on some processors
        values = halves.view(np.float16).astype(np.float32)
    # A NaN keeps its bits and is made quiet, as processors do it; numpy's rule varies.
    nan = (halves & 0x7FFF) > 0x7C00
    wide = halves.astype(np.uint32)
    quiet = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    return np.where(nan, quiet, values.view(np.uint32)).view(np.float32)


def encode(row: Format, values: Floats) -> Bytes:
    """uint8[n, row_bytes] of float32[n, elements], without the Hadamard rotation."""
    if row.is_quantized:
        return encode_blocks(row.codec, values)
    tight = np.ascontiguousarray(values)
    if row.name == "f32":
        return tight.view(np.uint8)
    raw = tight.view(np.uint32)
    nan = (raw & 0x7FFFFFFF) > 0x7F800000
    if row.name == "bf16":
        nearest = (raw.astype(np.uint64) + 0x7FFF + (raw >> 16 & 1)) >> 16
        quiet = raw >> 16 | 0x40
    else:
        with np.errstate(all="ignore"):
            nearest = tight.astype(np.float16).view(np.uint16)
        quiet = raw >> 16 & 0x8000 | 0x7E00 | raw >> 13 & 0x1FF
    return np.where(nan, quiet, nearest).astype(np.uint16).view(np.uint8)
