"""The kernels that the rest of towerd calls: C++ if it is built, else numpy.

`TOWERD_KERNELS=reference` or `native` forces one; it is read at every call, so tests can flip it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol, cast

from towerd.kernels.reference import Bytes, Index, Job

__all__ = ["THREADS", "Job", "copy_planes", "gather_rows", "name", "transpose"]

THREADS = min(4, os.cpu_count() or 1)
"""Default upper bound of threads: a few cores already use all of the memory bandwidth."""
ENV = "TOWERD_KERNELS"
log = logging.getLogger(__name__)


class _Kernels(Protocol):
    def copy_planes(self, dst: Any, jobs: Sequence[Job], n_threads: int = 1) -> None: ...
    def gather_rows(self, src: Bytes, index: Index, out: Bytes, n_threads: int = 1) -> None: ...
    def transpose(self, src: Bytes, out: Bytes, element_bytes: int, n_threads: int = 1) -> None: ...


@functools.cache
def _load(choice: str) -> tuple[str, _Kernels]:
    if choice not in ("", "reference", "native"):
        raise ValueError(f"{ENV}={choice}: expected reference or native")
    if choice != "reference":
        try:
            return "native", cast(_Kernels, importlib.import_module("towerd.kernels._native"))
        except ImportError:
            if choice == "native":
                raise
            log.warning("towerd.kernels._native is not built: using the slow numpy reference")
    return "reference", cast(_Kernels, importlib.import_module("towerd.kernels.reference"))


def _kernels() -> _Kernels:
    return _load(os.environ.get(ENV, ""))[1]


def name() -> str:
    """Which implementation is in use: `native` or `reference`.

    ValueError if TOWERD_KERNELS holds anything else, ImportError if `native` is not built."""
    return _load(os.environ.get(ENV, ""))[0]


def copy_planes(dst: Any, jobs: Sequence[Job], n_threads: int = THREADS) -> None:
    """Many row copies into one buffer; see `reference.copy_planes`."""
    _kernels().copy_planes(dst, jobs, n_threads)


def gather_rows(src: Bytes, index: Index, out: Bytes, n_threads: int = THREADS) -> None:
    """out[i] = src[index[i]]; see `reference.gather_rows`."""
    _kernels().gather_rows(src, index, out, n_threads)


def transpose(src: Bytes, out: Bytes, element_bytes: int, n_threads: int = THREADS) -> None:
    """out[c, r] = src[r, c]; see `reference.transpose`."""
    _kernels().transpose(src, out, element_bytes, n_threads)
