"""The kernels in numpy, which the tests compare the C++ with; `towerd.kernels.dispatch` says what each does.

Every function checks its arguments before it touches memory that the caller can see and raises
ValueError with the argument's name first. Functions that may find bad rows in the middle of the
work return new memory and have no `out`. The C++ versions have the same signatures and refuse the
same input; `n_threads` (1 to 1024) is an upper bound there and only checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.reference import checks as checks
from lab.reference.attention import attention_mass as attention_mass
from lab.reference.hadamard import hadamard as hadamard
from lab.reference.rope import rope_shift as rope_shift
from lab.reference.transcode import transcode as transcode
from lab.reference.transcode import transcoded as transcoded
from towerd.kernels.arrays import Bytes, Index, Job
from towerd.kernels.mlx import arguments


def copy_planes(dst: Any, jobs: Sequence[Job], n_threads: int = 1) -> None:
    """See `dispatch.copy_planes`."""
    arguments.check_threads(n_threads)
    target = checks.check_target(dst)
    work = []
    for i, job in enumerate(checks.check_jobs(jobs)):
        work.append(checks.job_rows(job, 3, f"jobs[{i}]", target))
        checks.check_job(work[-1], work[-1].rows.shape[1], f"jobs[{i}]", target)
    checks.check_spans([(j.offset, j.offset + len(j.take) * j.rows.shape[1]) for j in work])
    for each in work:
        size = len(each.take) * each.rows.shape[1]
        taken = each.rows[each.take]
        target[each.offset : each.offset + size].reshape(taken.shape)[:] = taken


def gather_rows(src: Bytes, index: Index, out: Bytes, n_threads: int = 1) -> None:
    """See `dispatch.gather_rows`."""
    arguments.check_threads(n_threads)
    source = arguments.rows_of(src, "src")
    take = checks.check_index(index, len(source), "index")
    target = arguments.rows_of(out, "out", writable=True)
    if target.shape != (len(take), source.shape[1]):
        raise ValueError(f"out: expected shape ({len(take)}, {source.shape[1]})")
    arguments.check_apart(source, target, "out: overlaps src")
    target[:] = source[take]


def transpose(src: Bytes, out: Bytes, element_bytes: int, n_threads: int = 1) -> None:
    """See `dispatch.transpose`."""
    arguments.check_threads(n_threads)
    arguments.check_int(element_bytes, "element_bytes", 1, 4)
    if element_bytes == 3:
        raise ValueError("element_bytes: expected 1, 2 or 4")
    source, target = arguments.rows_of(src, "src"), arguments.rows_of(out, "out", writable=True)
    if source.shape[1] % element_bytes:
        raise ValueError("src: rows are not whole elements")
    n, columns = source.shape[0], source.shape[1] // element_bytes
    if target.shape != (columns, n * element_bytes):
        raise ValueError(f"out: expected shape ({columns}, {n * element_bytes})")
    arguments.check_apart(source, target, "out: overlaps src")
    moved = source.reshape(n, columns, element_bytes).transpose(1, 0, 2)
    target[:] = moved.reshape(target.shape)
