"""The kernels in numpy: the specification of each, which the tests compare the C++ with.

Every function checks its arguments before it touches memory that the caller can see and raises
ValueError with the argument's name first. Functions that may find bad rows in the middle of the
work return new memory and have no `out`. The C++ versions have the same signatures and refuse the
same input; `n_threads` (1 to 1024) is an upper bound there and only checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from towerd.kernels.reference import checks as checks
from towerd.kernels.reference.attention import attention_mass
from towerd.kernels.reference.checks import Bytes, Floats, Index, Lines
from towerd.kernels.reference.hadamard import hadamard
from towerd.kernels.reference.rope import rope_shift
from towerd.kernels.reference.transcode import TranscodeJob, transcode, transcoded

__all__ = [
    "Bytes",
    "Floats",
    "Index",
    "Job",
    "Lines",
    "TranscodeJob",
    "attention_mass",
    "copy_planes",
    "gather_rows",
    "hadamard",
    "rope_shift",
    "transcode",
    "transcoded",
    "transpose",
]

Job: TypeAlias = tuple[int, Bytes, Index | None]
"""(offset in dst, rows uint8[n, row_bytes], int64[m] row numbers to take or None for all)."""


def copy_planes(dst: Any, jobs: Sequence[Job], n_threads: int = 1) -> None:
    """Copy the rows of every job into `dst`, one row after the other from the job's offset.

    dst: a writable contiguous buffer of bytes, one dimension
    jobs: a list or tuple; rows may lie any distance apart, each row itself is contiguous

    ValueError if a job does not fit into dst, two jobs write the same bytes, a source lies in
    dst, or an index is out of range; nothing has been written then."""
    checks.check_threads(n_threads)
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
    """out[i] = src[index[i]].

    src: uint8[n, row_bytes]; index: int64[m], each in [0, n); out: uint8[m, row_bytes].
    Rows of src and out may lie any distance apart; they must not share memory."""
    checks.check_threads(n_threads)
    source = checks.rows_of(src, "src")
    take = checks.check_index(index, len(source), "index")
    target = checks.rows_of(out, "out", writable=True)
    if target.shape != (len(take), source.shape[1]):
        raise ValueError(f"out: expected shape ({len(take)}, {source.shape[1]})")
    checks.check_apart(source, target, "out: overlaps src")
    target[:] = source[take]


def transpose(src: Bytes, out: Bytes, element_bytes: int, n_threads: int = 1) -> None:
    """out[c, r] = src[r, c], both seen as matrices of elements of 1, 2 or 4 bytes.

    src: uint8[r, c * element_bytes]; out: uint8[c, r * element_bytes]; rows may lie any
    distance apart; the two must not share memory. It is its own inverse."""
    checks.check_threads(n_threads)
    checks.check_int(element_bytes, "element_bytes", 1, 4)
    if element_bytes == 3:
        raise ValueError("element_bytes: expected 1, 2 or 4")
    source, target = checks.rows_of(src, "src"), checks.rows_of(out, "out", writable=True)
    if source.shape[1] % element_bytes:
        raise ValueError("src: rows are not whole elements")
    n, columns = source.shape[0], source.shape[1] // element_bytes
    if target.shape != (columns, n * element_bytes):
        raise ValueError(f"out: expected shape ({columns}, {n * element_bytes})")
    checks.check_apart(source, target, "out: overlaps src")
    moved = source.reshape(n, columns, element_bytes).transpose(1, 0, 2)
    target[:] = moved.reshape(target.shape)
