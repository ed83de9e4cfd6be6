"""The kernels in numpy: what each one means, and what the tests compare the C++ against.

Every function checks all arguments before it touches memory and raises ValueError with the
argument's name first. The C++ versions have the same signatures and refuse the same input;
`n_threads` (1 to 1024) is an upper bound there and only checked here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Index: TypeAlias = npt.NDArray[np.int64]
Job: TypeAlias = tuple[int, Bytes, Index | None]
"""(offset in dst, rows uint8[n, row_bytes], int64[m] row numbers to take or None for all)."""

THREADS_MAX = 1024


def copy_planes(dst: Any, jobs: Sequence[Job], n_threads: int = 1) -> None:
    """Copy the rows of every job into `dst`, one row after the other from the job's offset.

    dst: a writable contiguous buffer of bytes, one dimension
    jobs: a list or tuple; rows may lie any distance apart, each row itself is contiguous

    ValueError if a job does not fit into dst, two jobs write the same bytes, a source lies in
    dst, or an index is out of range; nothing has been written then."""
    _check_int(n_threads, "n_threads", 1, THREADS_MAX)
    target = _buffer(dst, "dst", 1, writable=True)
    if not target.flags.c_contiguous:
        raise ValueError("dst: not contiguous")
    if not isinstance(jobs, list | tuple):
        raise ValueError("jobs: expected a list or tuple")
    work = [_checked_job(job, target, f"jobs[{i}]") for i, job in enumerate(jobs)]
    spans = sorted((at, at + len(take) * rows.shape[1]) for at, rows, take in work)
    spans = [span for span in spans if span[0] < span[1]]
    if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        raise ValueError("jobs: two jobs write the same bytes")
    for offset, rows, take in work:
        size = len(take) * rows.shape[1]
        target[offset : offset + size].reshape(len(take), rows.shape[1])[:] = rows[take]


def gather_rows(src: Bytes, index: Index, out: Bytes, n_threads: int = 1) -> None:
    """out[i] = src[index[i]].

    src: uint8[n, row_bytes]; index: int64[m], each in [0, n); out: uint8[m, row_bytes].
    Rows of src and out may lie any distance apart; they must not share memory."""
    _check_int(n_threads, "n_threads", 1, THREADS_MAX)
    source = _rows(src, "src")
    take = _checked_index(index, len(_rows(src, "src")), "index")
    target = _rows(out, "out", writable=True)
    if target.shape != (len(take), source.shape[1]):
        raise ValueError(f"out: expected shape ({len(take)}, {source.shape[1]})")
    _check_apart(source, target, "out: overlaps src")
    target[:] = source[take]


def transpose(src: Bytes, out: Bytes, element_bytes: int, n_threads: int = 1) -> None:
    """out[c, r] = src[r, c], both seen as matrices of elements of 1, 2 or 4 bytes.

    src: uint8[r, c * element_bytes]; out: uint8[c, r * element_bytes]; rows may lie any
    distance apart; the two must not share memory. It is its own inverse."""
    _check_int(n_threads, "n_threads", 1, THREADS_MAX)
    _check_int(element_bytes, "element_bytes", 1, 4)
    if element_bytes == 3:
        raise ValueError("element_bytes: expected 1, 2 or 4")
    source, target = _rows(src, "src"), _rows(out, "out", writable=True)
    if source.shape[1] % element_bytes:
        raise ValueError("src: rows are not whole elements")
    n, columns = source.shape[0], source.shape[1] // element_bytes
    if target.shape != (columns, n * element_bytes):
        raise ValueError(f"out: expected shape ({columns}, {n * element_bytes})")
    _check_apart(source, target, "out: overlaps src")
    moved = source.reshape(n, columns, element_bytes).transpose(1, 0, 2)
    target[:] = moved.reshape(target.shape)


def _checked_job(job: Job, dst: Bytes, name: str) -> tuple[int, Bytes, Index]:
    if not _is_tuple_of_3(job):
        raise ValueError(f"{name}: expected a tuple (offset, rows, index)")
    offset, rows, index = job
    _check_int(offset, f"{name}.offset", 0, len(dst))
    source = _rows(rows, f"{name}.rows")
    if index is None:
        take = np.arange(len(source), dtype=np.int64)
    else:
        take = _checked_index(index, len(source), f"{name}.index")
    if offset + len(take) * source.shape[1] > len(dst):
        raise ValueError(
            f"{name}: {len(take)} rows of {source.shape[1]} bytes do not fit into the "
            f"{len(dst) - offset} bytes of dst from offset {offset}"
        )
    _check_apart(source, dst, "jobs: a source lies in dst")
    return offset, source, take


def _is_tuple_of_3(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 3


def _check_int(value: object, name: str, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}")


def _buffer(value: Any, name: str, ndim: int, *, writable: bool = False) -> Bytes:
    try:
        array = np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError) as error:
        raise ValueError(f"{name}: not a buffer") from error
    if array.dtype != np.uint8 or array.ndim != ndim:
        raise ValueError(
            f"{name}: expected {ndim} dimension(s) of 1-byte integers, "
            f"found {array.dtype} of {array.ndim} dimension(s)"
        )
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: not a writable buffer")
    return array


def _rows(value: Any, name: str, *, writable: bool = False) -> Bytes:
    array = _buffer(value, name, 2, writable=writable)
    if array.shape[1] > 1 and array.strides[1] != 1:
        raise ValueError(f"{name}: the bytes of a row are not contiguous")
    if array.shape[0] > 1 and array.strides[0] < array.shape[1]:
        raise ValueError(f"{name}: rows overlap or run backwards")
    return array


def _checked_index(index: Any, n_rows: int, name: str) -> Index:
    try:
        array = np.asarray(memoryview(index))
    except (TypeError, ValueError, BufferError) as error:
        raise ValueError(f"{name}: not a buffer") from error
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError(f"{name}: expected 1 dimension(s) of 8-byte integers")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: not contiguous")
    if not array.flags.aligned:
        raise ValueError(f"{name}: not aligned")
    if len(array) and (array.min() < 0 or array.max() >= n_rows):
        raise ValueError(f"{name}: a row is not in [0, {n_rows})")
    return array


def _check_apart(source: Bytes, target: Bytes, message: str) -> None:
    if source.size and target.size and np.may_share_memory(source, target):
        raise ValueError(message)
