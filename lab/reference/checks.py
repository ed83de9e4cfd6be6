"""Checks of the arguments of the kernels; every failure is a ValueError that names the argument."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from towerd.kernels.arrays import Bytes, Index
from towerd.kernels.mlx.arguments import array_of, check_apart, check_contiguous, check_int, rows_of

KEY_MAX = 1e15
COUNT_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits of a search in a tree: points that it looks at in a node, and nodes that it enters on
    a level; 0: all."""

    visits: int
    beam: int


@dataclass(frozen=True, slots=True)
class JobRows:
    """Rows of one job and where in dst they go."""

    offset: int
    rows: Bytes
    take: Index


def check_target(value: Any) -> Bytes:
    """`dst`: a writable contiguous buffer of bytes, one dimension."""
    target = array_of(value, "dst", np.uint8, 1)
    if not target.flags.writeable:
        raise ValueError("dst: not a writable buffer")
    check_contiguous(target, "dst")
    return target


def check_index(index: Any, n_rows: int, name: str) -> Index:
    """int64[m], each in [0, n_rows)."""
    array = array_of(index, name, np.int64, 1)
    check_contiguous(array, name)
    if len(array) and (array.min() < 0 or array.max() >= n_rows):
        raise ValueError(f"{name}: a row is not in [0, {n_rows})")
    return array


def check_jobs(jobs: object) -> Sequence[Any]:
    """A list or tuple."""
    if not isinstance(jobs, list | tuple):
        raise ValueError("jobs: expected a list or tuple")
    return jobs


def job_rows(job: Any, length: int, name: str, dst: Bytes) -> JobRows:
    """The front of a job's tuple: (offset, rows, index)."""
    if not (isinstance(job, tuple) and len(job) == length):
        more = "" if length == 3 else ", src_format, dst_format"
        raise ValueError(f"{name}: expected a tuple (offset, rows, index{more})")
    offset, rows, index = job[:3]
    check_int(offset, f"{name}.offset", 0, len(dst))
    source = rows_of(rows, f"{name}.rows")
    if index is None:
        take = np.arange(len(source), dtype=np.int64)
    else:
        take = check_index(index, len(source), f"{name}.index")
    return JobRows(offset, source, take)


def check_job(job: JobRows, row_bytes: int, name: str, dst: Bytes) -> None:
    """The job's rows fit behind its offset and do not lie in dst."""
    room = len(dst) - job.offset
    if len(job.take) * row_bytes > room:
        raise ValueError(
            f"{name}: {len(job.take)} rows of {row_bytes} bytes do not fit into the "
            f"{room} bytes of dst from offset {job.offset}"
        )
    check_apart(job.rows, dst, "jobs: a source lies in dst")


def check_spans(spans: Sequence[tuple[int, int]]) -> None:
    """No two of the [begin, end) share a byte."""
    real = sorted(span for span in spans if span[0] < span[1])
    if any(a[1] > b[0] for a, b in itertools.pairwise(real)):
        raise ValueError("jobs: two jobs write the same bytes")


def check_ratio(ratio: object) -> float:
    """The share of a level's keys that are promoted, in (0, 0.5]."""
    if not isinstance(ratio, float) or not 0 < ratio <= 0.5:
        raise ValueError("ratio: expected a float above 0, at most 0.5")
    return ratio


def check_rows(rows: object, n_dims: int, name: str) -> None:
    """Keys or queries, float32[any, n_dims]."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or rows.ndim != 2:
        raise ValueError(f"{name}: expected float32 rows")
    if not rows.flags.c_contiguous or not rows.flags.aligned:
        raise ValueError(f"{name}: not contiguous")
    if rows.shape[1] != n_dims:
        raise ValueError(f"{name}: rows of {rows.shape[1]} numbers, expected {n_dims}")
    if not (np.isfinite(rows).all() and (np.abs(rows) <= KEY_MAX).all()):
        raise ValueError(f"{name}: a number is not finite or larger than 1e15")


def check_limits(visits_max: object, beam: object) -> SearchLimits:
    """Both limits. Raises ValueError if one is out of range."""
    return SearchLimits(
        check_int(visits_max, "visits_max", 0, COUNT_MAX), check_int(beam, "beam", 0, COUNT_MAX)
    )
