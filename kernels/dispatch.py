"""The kernels that the rest of towerd calls: C++ for this machine's instruction set, else numpy.

`TOWERD_KERNELS` forces one: `reference` (numpy), `generic`, `avx2`, `avx512` or `neon` (C++), or
`metal` (an Apple GPU for `rope_shift`, C++ for the rest). It is read at every call, so tests can
change it; a choice that this machine cannot run is a ValueError, never a fallback. `metal` is taken
only if it is forced: nobody has measured yet on which Macs it beats the CPU.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from towerd.kernels.reference import Bytes, Floats, Index, Job, Lines, TranscodeJob

__all__ = [
    "THREADS",
    "Job",
    "TranscodeJob",
    "attention_mass",
    "available",
    "copy_planes",
    "gather_rows",
    "hadamard",
    "name",
    "rope_shift",
    "transcode",
    "transcoded",
    "transpose",
]

THREADS = min(4, os.cpu_count() or 1)
"""Default upper bound of threads: a few cores already use all of the memory bandwidth."""
ENV = "TOWERD_KERNELS"
CHOICES = ("reference", "generic", "avx2", "avx512", "neon", "metal")
log = logging.getLogger(__name__)


class _RopeKernel(Protocol):
    def rope_shift(
        self,
        src: Bytes,
        out: Bytes,
        format: str,
        cos: Floats,
        sin: Floats,
        row_table: Lines | None,
        head_dim: int,
        n_rot: int,
        first: int,
        neox: bool,
        hadamard_block: int,
        n_threads: int = 1,
    ) -> None: ...


class _Kernels(_RopeKernel, Protocol):
    def hadamard(self, src: Floats, out: Floats, block: int, n_threads: int = 1) -> None: ...
    def copy_planes(self, dst: Any, jobs: Sequence[Job], n_threads: int = 1) -> None: ...
    def gather_rows(self, src: Bytes, index: Index, out: Bytes, n_threads: int = 1) -> None: ...
    def transpose(self, src: Bytes, out: Bytes, element_bytes: int, n_threads: int = 1) -> None: ...
    def transcode(
        self, dst: Any, jobs: Sequence[TranscodeJob], n_threads: int = 1, is_new: bool = False
    ) -> None: ...
    def transcoded(
        self, rows: Bytes, src_format: str, dst_format: str, n_threads: int = 1
    ) -> Bytes: ...
    def attention_mass(
        self,
        queries: Floats,
        keys: Bytes,
        format: str,
        n_seen: Index,
        head_dim: int,
        scale: float,
        n_threads: int = 1,
    ) -> Floats: ...


def available() -> tuple[str, ...]:
    """The valid values of TOWERD_KERNELS on this machine, best first; `reference` is last."""
    built = native()
    names = tuple(built.available()) if built else ()
    return (*(("metal",) if _metal_missing() is None else ()), *names, "reference")


def name() -> str:
    """Which implementation is in use: one of `available()`.

    ValueError if TOWERD_KERNELS holds anything else."""
    return _load(os.environ.get(ENV, ""))[0]


@functools.cache
def native() -> Any:
    """The C++ module, or None where it is not built."""
    try:
        return importlib.import_module("towerd.kernels._native")
    except ImportError as error:
        log.warning("towerd.kernels._native is not built (%s): the numpy reference is slow", error)
        return None


def _metal_missing() -> str | None:
    """What `metal` lacks on this machine, as the end of a sentence; None if it can run."""
    if native() is None:
        return "needs the C++ kernels, which are not built"
    try:
        is_available = _metal().available()
    except ImportError:
        return "needs mlx, which is not installed (on Apple Silicon: pip install 'towerd[mlx]')"
    return None if is_available else "needs an Apple GPU, and MLX has none here"


def _metal() -> ModuleType:
    return importlib.import_module("towerd.kernels.mlx.kernels")


@functools.cache
def _load(choice: str) -> tuple[str, _Kernels, _RopeKernel]:
    """(name, kernels, what has rope_shift: the GPU's if `metal` is chosen)."""
    if choice and choice not in CHOICES:
        raise ValueError(f"{ENV}={choice}: expected one of {', '.join(CHOICES)}")
    built = native()
    if choice == "metal" and (missing := _metal_missing()) is not None:
        raise ValueError(f"{ENV}=metal: {missing}")
    if choice == "reference" or (built is None and not choice):
        reference = cast(_Kernels, importlib.import_module("towerd.kernels.reference"))
        return "reference", reference, reference
    names = built.available() if built else []
    best = names[0] if choice in ("", "metal") else choice
    if best not in names:
        found = ", ".join(available())
        raise ValueError(f"{ENV}={choice}: not on this machine, which has {found}")
    kernels = cast(_Kernels, built.Kernels(best))
    if choice == "metal":
        return choice, kernels, cast(_RopeKernel, _metal())
    return best, kernels, kernels


def _kernels() -> _Kernels:
    return _load(os.environ.get(ENV, ""))[1]


def _rope_kernel() -> _RopeKernel:
    return _load(os.environ.get(ENV, ""))[2]


def copy_planes(dst: Any, jobs: Sequence[Job], n_threads: int = THREADS) -> None:
    """Many row copies into one buffer; see `reference.copy_planes`."""
    _kernels().copy_planes(dst, jobs, n_threads)


def gather_rows(src: Bytes, index: Index, out: Bytes, n_threads: int = THREADS) -> None:
    """out[i] = src[index[i]]; see `reference.gather_rows`."""
    _kernels().gather_rows(src, index, out, n_threads)


def transpose(src: Bytes, out: Bytes, element_bytes: int, n_threads: int = THREADS) -> None:
    """out[c, r] = src[r, c]; see `reference.transpose`."""
    _kernels().transpose(src, out, element_bytes, n_threads)


def transcode(
    dst: Any, jobs: Sequence[TranscodeJob], n_threads: int = THREADS, is_new: bool = False
) -> None:
    """Decode many rows into one buffer; see `reference.transcode.transcode`."""
    _kernels().transcode(dst, jobs, n_threads, is_new)


def transcoded(rows: Bytes, src_format: str, dst_format: str, n_threads: int = THREADS) -> Bytes:
    """Rows in another format, in new memory; see `reference.transcode.transcoded`."""
    return _kernels().transcoded(rows, src_format, dst_format, n_threads)


def rope_shift(
    src: Bytes,
    out: Bytes,
    format: str,
    cos: Floats,
    sin: Floats,
    row_table: Lines | None,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
    n_threads: int = THREADS,
) -> None:
    """Rotate K rows by a position delta; see `reference.rope.rope_shift`."""
    rotation = (cos, sin, row_table, head_dim, n_rot, first, neox, hadamard_block)
    _rope_kernel().rope_shift(src, out, format, *rotation, n_threads)


def hadamard(src: Floats, out: Floats, block: int, n_threads: int = THREADS) -> None:
    """Walsh-Hadamard transform of runs of `block`; see `reference.hadamard.hadamard`."""
    _kernels().hadamard(src, out, block, n_threads)


def attention_mass(
    queries: Floats,
    keys: Bytes,
    format: str,
    n_seen: Index,
    head_dim: int,
    scale: float,
    n_threads: int = THREADS,
) -> Floats:
    """How much attention each cached key gets; see `reference.attention.attention_mass`."""
    return _kernels().attention_mass(queries, keys, format, n_seen, head_dim, scale, n_threads)
