"""Rows from one format into another, in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from towerd.kernels import reference_checks as checks
from towerd.kernels.formats import Format
from towerd.kernels.reference_blocks import decode_blocks, encode_blocks
from towerd.kernels.reference_checks import Bytes, Floats, Index, JobRows
from towerd.kernels.reference_hadamard import transform

TranscodeJob: TypeAlias = tuple[int, Bytes, Index | None, str, str]
"""(offset in dst, rows uint8[n, row_bytes], int64[m] row numbers to take or None for all,
format of the rows, format to write)."""

F16_MAX = np.float32(65504)


@dataclass(frozen=True, slots=True)
class _Work:
    """One checked job."""

    name: str
    job: JobRows
    source: Format
    target: Format
    n_elements: int

    @property
    def size(self) -> int:
        """Bytes that it writes."""
        return len(self.job.take) * self.target.row_bytes(self.n_elements)

    @property
    def bytes(self) -> Bytes:
        """What it writes; ValueError names the first row that its format cannot hold."""
        rows = self.job.rows[self.job.take]
        if self.source is self.target:
            return rows
        values = decode(self.source, rows)
        block = self.source.hadamard_block(self.n_elements)
        rotated = self.target.hadamard_block(self.n_elements)
        if block and not rotated:
            values = transform(values, block)
        if self.target.is_quantized:
            self._check_range(values, 0 if block else rotated)
        if rotated and not block:
            values = transform(values, rotated)
        return encode(self.target, values)

    def _check_range(self, values: Floats, rotated: int) -> None:
        limit = F16_MAX / np.float32(math.sqrt(rotated or 1))
        with np.errstate(invalid="ignore"):
            bad = np.flatnonzero(~(np.abs(values) <= limit).all(axis=1))
        if len(bad):
            row = f"{self.name}.rows: row {self.job.take[bad[0]]}"
            if np.isfinite(values[bad[0]]).all():
                raise ValueError(f"{row} has a number beyond +-{limit:.0f}")
            raise ValueError(f"{row} is not finite")


def transcode(dst: Any, jobs: Sequence[TranscodeJob], n_threads: int = 1) -> None:
    """Write the rows of every job into `dst` in another format, one row after the other.

    dst: a writable contiguous buffer of bytes, one dimension
    jobs: a list or tuple of `TranscodeJob`; rows may lie any distance apart

    Rows of a format with a Hadamard rotation are rotated back after decoding, and rotated before
    encoding (by runs of `Format.hadamard_block`); from one such format into another neither is
    done. The same format on both sides copies bytes. f32 becomes f16 and bf16 by rounding to
    nearest, ties to even; beyond f16's range that is infinity, and a NaN stays one.

    ValueError if a job does not fit into dst, two jobs write the same bytes, a source lies in
    dst, an index is out of range, a format is unknown, rows are not whole blocks, or a row that
    is to be quantized holds a NaN, an infinity or a number beyond +-65504 (before a Hadamard
    rotation of n elements: 65504 / sqrt(n)); nothing has been written then."""
    checks.check_threads(n_threads)
    target = checks.check_target(dst)
    work = [
        _checked_job(job, f"jobs[{i}]", target) for i, job in enumerate(checks.check_jobs(jobs))
    ]
    checks.check_spans([(each.job.offset, each.job.offset + each.size) for each in work])
    written = [each.bytes for each in work]
    for each, rows in zip(work, written, strict=True):
        target[each.job.offset : each.job.offset + each.size] = rows.reshape(-1)


def _checked_job(job: Any, name: str, dst: Bytes) -> _Work:
    rows = checks.job_rows(job, 5, name, dst)
    source = checks.check_format(job[3], f"{name}.src_format")
    target = checks.check_format(job[4], f"{name}.dst_format")
    n_elements = checks.elements_of(source, rows.rows.shape[1], f"{name}.rows")
    if n_elements % target.block_elements:
        raise ValueError(f"{name}.dst_format: {target.name} holds no rows of {n_elements} elements")
    checks.check_job(rows, target.row_bytes(n_elements), name, dst)
    return _Work(name, rows, source, target, n_elements)


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
    values = halves.view(np.float16).astype(np.float32)
    # A NaN keeps its bits and is made quiet, as the processors do; numpy's rule varies.
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
