"""Transform coding of rows: the kernels of this machine's instruction set, which all write the same bytes.

The contract is in `lab.reference.row_transform` (the transform, the rounding) and `lab.reference.rans` (the
bytes of a page).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from towerd.kernels import _native, dispatch
from towerd.kernels._native import PAGE_ROWS_MAX, Quantizer, RowTransform
from towerd.kernels.arrays import Bytes, Floats

SYMBOLS = 64
"""Entries of a table: the values -31 to 31, and the escape."""
HALF, ESCAPE = 31, 63
TABLE_SUM = 1 << 14
"""What the frequencies of a table add up to."""
SHIFT_MAX = 10
CLASSES_MAX = 64

EncodeJob: TypeAlias = tuple[RowTransform, Quantizer, Sequence[Bytes]]
"""(transform, quantizer, planes uint8[n, row_bytes], which together are a row of the transform)."""
DecodeJob: TypeAlias = tuple[RowTransform, Quantizer, Any, Sequence[Bytes]]
"""(transform, quantizer, a page, the planes to write)."""

__all__ = ["PAGE_ROWS_MAX", "Quantizer", "RowTransform"]


def components(
    transform: RowTransform,
    planes: Sequence[Bytes],
    format: str,
    n_threads: int = dispatch.THREADS,
) -> Floats:
    """float32[n, n_components]: rows as the transform has them, before they are rounded.

    planes: uint8[n, row_bytes] in `format` (f32, f16 or bf16), n at most PAGE_ROWS_MAX

    ValueError for shapes that do not fit and rows that are not finite."""
    return _native.row_components(transform, planes, format, n_threads, dispatch.instructions())


def encode_pages(
    jobs: Sequence[EncodeJob], format: str, n_threads: int = dispatch.THREADS
) -> list[bytes]:
    """The page of each job. ValueError as from `components`."""
    return _native.encode_row_pages(jobs, format, n_threads, dispatch.instructions())


def decode_pages(
    jobs: Sequence[DecodeJob], format: str, n_threads: int = dispatch.THREADS
) -> list[bool]:
    """Read each page into its planes; False for a page that `encode_pages` did not write, whose rows are
    undefined then.

    ValueError for shapes that do not fit, or if two jobs write the same bytes; nothing has been
    written then."""
    return _native.decode_row_pages(jobs, format, n_threads, dispatch.instructions())
