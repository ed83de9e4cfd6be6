"""The kernels that the rest of towerd calls: C++ for this machine's instruction set.

`TOWERD_KERNELS` forces one: `generic`, `avx2`, `avx512` or `neon` (C++), or `metal` (an Apple GPU for
`rope_shift`, C++ for the rest). It is read at every call, so tests can change it; a choice that this
machine cannot run is a ValueError, never a fallback. `metal` is taken only if it is forced: nobody
has measured yet on which Macs it beats the CPU.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from towerd.kernels import _native
from towerd.kernels.arrays import Bytes, Floats, Index, Job, Lines, TranscodeJob

THREADS = min(4, os.cpu_count() or 1)
"""Default upper bound of threads: a few cores already use all of the memory bandwidth."""
ENV = "TOWERD_KERNELS"
CHOICES = ("generic", "avx2", "avx512", "neon", "metal")


def available() -> tuple[str, ...]:
    """The valid values of TOWERD_KERNELS on this machine, best first."""
    return (*(("metal",) if _metal_missing() is None else ()), *_native.available())


def name() -> str:
    """Which implementation is in use: one of `available()`.

    ValueError if TOWERD_KERNELS holds anything else."""
    return _chosen(os.environ.get(ENV, ""))


def instructions() -> str:
    """The instruction set that C++ kernels use. ValueError as from `name`."""
    return _kernels().name


def _metal_missing() -> str | None:
    """What `metal` lacks on this machine, as the end of a sentence; None if it can run."""
    try:
        is_available = _metal().available()
    except ImportError:
        return "needs mlx, which is not installed (on Apple Silicon: pip install 'towerd[mlx]')"
    return None if is_available else "needs an Apple GPU, and MLX has none here"


def _metal() -> ModuleType:
    return importlib.import_module("towerd.kernels.mlx.kernels")


@functools.cache
def _chosen(choice: str) -> str:
    if choice and choice not in CHOICES:
        raise ValueError(f"{ENV}={choice}: expected one of {', '.join(CHOICES)}")
    if choice == "metal" and (missing := _metal_missing()) is not None:
        raise ValueError(f"{ENV}=metal: {missing}")
    names = _native.available()
    if choice in ("", "metal"):
        return choice or names[0]
    if choice not in names:
        found = ", ".join(available())
        raise ValueError(f"{ENV}={choice}: not on this machine, which has {found}")
    return choice


@functools.cache
def _made(name: str) -> _native.Kernels:
    return _native.Kernels(_native.available()[0] if name == "metal" else name)


def _kernels() -> _native.Kernels:
    return _made(name())


def copy_planes(dst: Any, jobs: Sequence[Job], n_threads: int = THREADS) -> None:
    """Copy the rows of every job into `dst`, one row after the other from the job's offset.

    dst: a writable contiguous buffer of bytes, one dimension
    jobs: a list or tuple; rows may lie any distance apart, each row itself is contiguous

    ValueError if a job does not fit into dst, two jobs write the same bytes, a source lies in
    dst, or an index is out of range; nothing has been written then."""
    _kernels().copy_planes(dst, jobs, n_threads)


def transpose(src: Bytes, out: Bytes, element_bytes: int, n_threads: int = THREADS) -> None:
    """out[c, r] = src[r, c], both seen as matrices of elements of 1, 2 or 4 bytes.

    src: uint8[r, c * element_bytes]; out: uint8[c, r * element_bytes]; rows may lie any
    distance apart; the two must not share memory. It is its own inverse."""
    _kernels().transpose(src, out, element_bytes, n_threads)


def transcode(
    dst: Any, jobs: Sequence[TranscodeJob], n_threads: int = THREADS, is_new: bool = False
) -> None:
    """Write the rows of every job into `dst` in another format, one row after the other.

    dst: a writable contiguous buffer of bytes, one dimension
    jobs: a list or tuple of `TranscodeJob`; rows may lie any distance apart
    is_new: dst has not been touched since it was mapped; this affects only the speed

    Rows of a format with a Hadamard rotation are rotated back after decoding (by runs of
    `Format.hadamard_block`). The same format on both sides copies bytes. f32 becomes f16 and bf16
    by rounding to nearest, ties to even; numbers beyond f16's range become infinity, NaN stays NaN.

    ValueError if a job does not fit into dst, two jobs write the same bytes, a source lies in
    dst, an index is out of range, a format is unknown, rows are not whole blocks, or rows would
    have to be quantized (use `transcoded`, because it may fail in the middle). In that case
    nothing has been written."""
    _kernels().transcode(dst, jobs, n_threads, is_new)


def transcoded(rows: Bytes, src_format: str, dst_format: str, n_threads: int = THREADS) -> Bytes:
    """`rows` of one format in another one, in new memory: uint8[n, row_bytes], contiguous.

    rows: uint8[n, row_bytes], any distance apart

    As `transcode`, but to quantized formats, too. If the target has a Hadamard rotation, rows are
    rotated before they are encoded; between two such formats no rotation is done or undone. Rows
    are read once, so a bad row may be found after others have been written; that is why the result
    is new memory and there is no `out`.

    ValueError if a format is unknown, rows are not whole blocks, or a row that is to be quantized
    holds a NaN, an infinity or a number beyond +-65504 (before a Hadamard rotation of n elements:
    65504 / sqrt(n))."""
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
    """Rotate the RoPE pairs (a, b) of K rows: (a cos - b sin, b cos + a sin).

    src, out: uint8[n, row_bytes], rows any distance apart, not in the same memory
    format: a cache type
    cos, sin: float32[k, n_rot / 2], contiguous: a line for each position delta that occurs
    row_table: int32[n], the line of each row; -1: the row does not move. None: all line 0
    head_dim, n_rot, first: in each head of head_dim elements, the n_rot from `first` on rotate
    neox: pair j is (j, j + n_rot / 2); otherwise (2j, 2j + 1)
    hadamard_block: rows hold keys rotated by Hadamard runs of this many elements (a power of two,
        32 to 512, that divides head_dim), which is undone before and redone after; 0: none

    Computed in f32, stored as the CPU backend of ggml stores it. Rows that do not move and
    blocks without a rotated element are copied as bytes, so partial rotary does not requantize
    elements that it does not rotate. Source: llama.cpp's build_rope_shift (llama-kv-cache.cpp) and
    Theorem 9 of the towers paper, without the cases that llama.cpp gets wrong.

    ValueError for mismatched shapes, a stored format, a table that is not finite, and a quantized
    row with a scale that is not finite; nothing has been written then."""
    rotation = (cos, sin, row_table, head_dim, n_rot, first, neox, hadamard_block)
    kernels = _metal() if name() == "metal" else _kernels()
    kernels.rope_shift(src, out, format, *rotation, n_threads)


def attention_mass(
    queries: Floats,
    keys: Bytes,
    format: str,
    n_seen: Index,
    head_dim: int,
    scale: float,
    n_threads: int = THREADS,
    sinks: Floats | None = None,
    weights: Floats | None = None,
) -> Floats:
    """float32[KV heads, n], new: the attention that each of n cached keys of one layer gets, summed
    over the heads of m queries that read the KV head. Each head of a query spreads its weight,
    weight * softmax(scale * q . k), over what it sees.

    queries: float32[m, heads * head_dim], rows any distance apart
    keys: uint8[n, row_bytes], KV heads * head_dim elements in `format`, a cache type, rows any
        distance apart; both rotated by RoPE, and queries by a Hadamard matrix if keys are. Head h reads KV head h // (heads / KV heads)
    n_seen: int64[m], 1 to n: how many keys the query sees, from the first on; this is a causal
        mask if keys are in order of position
    head_dim: 1 to 1024
    sinks: float32[heads], contiguous: the score of what takes its share beside all keys (gpt-oss);
        None: there is nothing
    weights: float32[m], contiguous: of each query; None: 1

    Sums are in float32 or wider. Source: llama.cpp `src/llama-graph.cpp`, build_attn_mha.

    ValueError for mismatched shapes, a format of which a head is not whole blocks, a count that is out
    of range, rows that are not finite, and scores beyond what float32 holds."""
    return _kernels().attention_mass(
        queries, keys, format, n_seen, head_dim, scale, n_threads, sinks, weights
    )
