"""`towerctl lab bench kernels`: GB/s of output of every kernel, beside memcpy and ggml, and
milliseconds of the attention kernel.

Single-core figures are what one worker thread gets; the last ones use every core. All jobs work on
rows of 1,024 elements (8 KV heads of 128), more of them than any cache holds. Kernels with an
`out` argument write to memory that was touched before; quantizers write to new memory every time,
and so does ggml here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.bench.kernels.ggml import Ggml
from towerd.cli.bench.harness.report import Report
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME

_ELEMENTS = 1024
_HEAD_DIM = 128
_ROWS, _ROWS_QUICK = 32768, 4096
_REPEATS = 7
_HEADS, _KV_HEADS, _QUERIES, _HEAD_DIM_1B = 32, 8, 64, 64
"""Shape for the attention kernel: one layer of the 1B model, with the queries of one eviction."""
_DECODED = ("q8_0", "q4_0", "q8", "q8h", "q6h", "q5h", "q4", "q4h", "q4ah")
_ENCODED = ("q8_0", "q5_0", "q4_0", "iq4_nl", "q8h", "q6h", "q5h", "q4", "q4h")

Bytes = npt.NDArray[np.uint8]


async def run(model: Path | None, quick: bool) -> Report:
    """Measure the kernels; `model` is ignored."""
    n_rows = _ROWS_QUICK if quick else _ROWS
    report = Report("kernels", f"{n_rows:,} rows of {_ELEMENTS}")
    values = np.random.default_rng(0).standard_normal((n_rows, _ELEMENTS)).astype(np.float32)
    half = values.astype(np.float16).view(np.uint8)
    report.figures["memcpy_gbps_core"] = _gbps(lambda out: np.copyto(out, half), half.shape)
    cores = os.cpu_count() or 1
    for name in dispatch.available():
        with forced(name):
            _measure(report, name, values, half)
    best = dispatch.name()
    _measure_all_cores(report, half, cores)
    _beside_ggml(report, values)
    _targets(report, best)
    return report


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Run with TOWERD_KERNELS=name."""
    before = os.environ.get(dispatch.ENV)
    os.environ[dispatch.ENV] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[dispatch.ENV]
        else:
            os.environ[dispatch.ENV] = before


def _measure(report: Report, isa: str, values: npt.NDArray[np.float32], half: Bytes) -> None:
    figures = report.figures
    figures[f"rope_shift_f16_{isa}_gbps_core"] = _gbps(_rope(half, 1), half.shape)
    for name in _DECODED:
        rows = dispatch.transcoded(half, "f16", name)
        figures[f"dequant_{name}_{isa}_gbps_core"] = _gbps(
            _decode(rows, name, "f16", 1), half.shape
        )
    for name in _ENCODED:
        figures[f"quant_{name}_{isa}_gbps_core"] = _gbps_new(_encode(half, "f16", name, 1))
    for n_keys in (4096, 16384):
        key = f"attention_mass_{n_keys // 1024}k_{isa}_ms_core"
        figures[key] = 1000 * _fastest_s(_attention(n_keys, 1))


def _measure_all_cores(report: Report, half: Bytes, cores: int) -> None:
    figures = report.figures
    figures["rope_shift_f16_gbps_all_cores"] = _gbps(_rope(half, cores), half.shape)
    figures["attention_mass_16k_ms_all_cores"] = 1000 * _fastest_s(_attention(16384, cores))
    for name in ("q8", "q6h", "q4h"):
        decode = _decode(dispatch.transcoded(half, "f16", name), name, "f16", cores)
        figures[f"dequant_{name}_gbps_all_cores"] = _gbps(decode, half.shape)
        figures[f"quant_{name}_gbps_all_cores"] = _gbps_new(_encode(half, "f16", name, cores))


def _beside_ggml(report: Report, values: npt.NDArray[np.float32]) -> None:
    """ggml's own CPU routines on the same rows, one core, float32 on the other side."""
    ggml, figures = Ggml(), report.figures
    source = values.view(np.uint8)
    for name, key in (("q8_0", "q8"), ("q4_0", "q4"), ("q5_0", "q5"), ("iq4_nl", "iq4_nl")):
        theirs = _gbps_new(partial(_ggml_encode, ggml, name, values))
        figures[f"ggml_quant_{key}_gbps_core"] = theirs
        figures[f"quant_{key}_vs_ggml"] = _gbps_new(_encode(source, "f32", name, 1)) / theirs
        rows = dispatch.transcoded(source, "f32", name)
        theirs = _gbps(partial(ggml.decode, name, rows), source.shape)
        ours = _gbps(_decode(rows, name, "f32", 1), source.shape)
        figures[f"ggml_dequant_{key}_gbps_core"] = theirs
        figures[f"dequant_{key}_vs_ggml"] = ours / theirs


def _ggml_encode(ggml: Ggml, name: str, values: npt.NDArray[np.float32]) -> Bytes:
    out = np.empty((len(values), BY_NAME[name].row_bytes(_ELEMENTS)), np.uint8)
    ggml.encode(name, values, out)
    return out


def _targets(report: Report, best: str) -> None:
    figures = report.figures
    memcpy = figures["memcpy_gbps_core"]
    figures["kernels"] = best
    figures["rope_shift_f16_vs_memcpy"] = figures[f"rope_shift_f16_{best}_gbps_core"] / memcpy
    figures["dequant_q4h_gbps_core"] = figures[f"dequant_q4h_{best}_gbps_core"]
    figures["dequant_q8_gbps_core"] = figures[f"dequant_q8_{best}_gbps_core"]
    report.target("rope_shift_f16_vs_memcpy", least=0.6)
    report.target("dequant_q4h_gbps_core", least=4)
    report.target("dequant_q8_gbps_core", least=6)
    report.target("quant_q8_vs_ggml", least=1)
    report.target("quant_q4_vs_ggml", least=1)


def _decode(rows: Bytes, source: str, target: str, n_threads: int) -> Callable[[Bytes], None]:
    return lambda out: dispatch.transcode(
        out.reshape(-1), [(0, rows, None, source, target)], n_threads
    )


def _encode(rows: Bytes, source: str, target: str, n_threads: int) -> Callable[[], Bytes]:
    return lambda: dispatch.transcoded(rows, source, target, n_threads)


def _attention(n_keys: int, n_threads: int) -> Callable[[], Any]:
    """Attention of the last queries of a layer."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((_QUERIES, _HEADS * _HEAD_DIM_1B), np.float32)
    keys = rng.standard_normal((n_keys, _KV_HEADS * _HEAD_DIM_1B), np.float32).astype(np.float16)
    seen = np.arange(n_keys - _QUERIES + 1, n_keys + 1)
    arguments = (queries, keys.view(np.uint8), "f16", seen, _HEAD_DIM_1B, 0.125, n_threads)
    return lambda: dispatch.attention_mass(*arguments)


def _rope(half: Bytes, n_threads: int) -> Callable[[Bytes], None]:
    angles = np.outer([1000.0], 10000.0 ** (-np.arange(0, _HEAD_DIM, 2) / _HEAD_DIM))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return lambda out: dispatch.rope_shift(
        half, out, "f16", cos, sin, None, _HEAD_DIM, _HEAD_DIM, 0, True, 0, n_threads
    )


def _gbps(work: Callable[[Bytes], Any], shape: tuple[int, ...]) -> float:
    """GB/s of output, the best of some runs after one that touches every page."""
    out = np.zeros(shape, np.uint8)
    return out.nbytes / _fastest_s(lambda: work(out)) / 1e9


def _gbps_new(work: Callable[[], Bytes]) -> float:
    """GB/s of output into memory that is new in every run, the best of some runs."""
    return work().nbytes / _fastest_s(work) / 1e9


def _fastest_s(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
