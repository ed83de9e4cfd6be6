"""`towerctl bench transform`: bits and drift of transform-coded rows on other text than they were learned from, and
what it takes to bring them back.

Rows of the first text are what the basis is learned from; those of the second are coded, but for the first and the
last ones of each prefix, and tokens after them are evaluated over native and over decoded rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench.quality.formats import measurer_on, read_text
from lab.bench.transform import wide
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import show_table
from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis, read_basis
from towerd.codec.rows.learn import Rounding
from towerd.engine.embedded.calibration.calibrate import calibration_text
from towerd.engine.embedded.calibration.measure import Measurer
from towerd.engine.embedded.calibration.measure_plan import WINDOW_TOKENS_MAX
from towerd.engine.embedded.calibration.transform_basis import learned, sandwiched, windows_of
from towerd.engine.moving.rotation import rope_of
from towerd.kernels import dispatch
from towerd.model.llama_model import LlamaModel
from towerd.models.bundled import default_model
from towerd.settings.sources import load
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import BOUNDS, FormatCost, bound_of, stored
from towerd.tiers.shrink import SINKS, TAIL

STEPS = (0.15, 0.18, 0.22, 0.27, 0.5, 0.65, 0.85)
STEPS_QUICK = (0.15, 0.22, 0.65)
"""Of the root mean variance of weighted numbers."""
BLOCK_FORMATS = ("q8h", "q5h", "q4h")
BITS_MAX = {"near": 2.6, "small": 1.3}
RATIO_MIN = 5.0
RATIO_8B_MIN = 15.0
RESUMED_TOKENS = 2048
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class BenchSize:
    """Continuations that are measured on the second text and on the first one; steps."""

    n_measured: int
    n_weighed: int
    n_windows: int
    steps: tuple[float, ...]


FULL = BenchSize(16, 8, 40, STEPS)
QUICK = BenchSize(4, 3, 8, STEPS_QUICK)


@dataclass(slots=True)
class TransformReport(Report):
    """`codings`: one line per coding, block formats first."""

    codings: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> None:
        columns = ("rows kept as", ">bits", ">mean KL", ">excess", ">top-1")
        show_table(
            columns,
            [
                (
                    line["name"],
                    f"{line['bits']:.3f}",
                    f"{line['kl']:.5f}",
                    f"{line['excess']:+.5f} ± {line['ci']:.5f}",
                    f"{line['top1']:.2%}",
                )
                for line in self.codings
            ],
        )
        Report.show(self)

    def as_json(self) -> dict[str, Any]:
        return {**Report.as_json(self), "codings": self.codings}


async def run(
    model: Path | None,
    quick: bool,
    *,
    learn_text: Path | None = None,
    text: Path | None = None,
    layers: int = 5,
) -> Report:
    """Learn, then measure. Raises ConfigError, ModelError, CodecError, NotSupported."""
    size = QUICK if quick else FULL
    path = default_model() if model is None else model
    first, second = texts(learn_text, text)
    report = TransformReport("transform", path.name)
    codings = {f"step {step:g}": Rounding(step) for step in size.steps}
    rope = _rope(path)
    began = time.monotonic()
    with measurer_on(path, first, size.n_windows) as measurer:
        report.figures["learned_tokens"] = sum(map(len, windows_of(measurer)))
        identity = hashlib.blake2b(path.name.encode(), digest_size=32).digest()
        basis = learned(measurer, rope, codings, layers, size.n_weighed, identity)
    report.figures |= {
        "learn_s": time.monotonic() - began,
        "group_layers": layers,
        "basis_mb": basis.nbytes / 1e6,
    }
    with measurer_on(path, second, size.n_measured) as measurer:
        _drift(report, measurer, basis, rope, [*codings])
        _rates(report, measurer, basis, rope)
    if not quick:
        _wide(report, path)
    return report


def texts(learn_text: Path | None, text: Path | None) -> tuple[str, str]:
    """The text to learn from and the one to measure on: by themselves two thirds and the rest of the calibration
    text. Raises ConfigError."""
    whole = calibration_text()
    cut = 2 * len(whole) // 3
    first = whole[:cut] if learn_text is None else read_text(learn_text)
    return first, whole[cut:] if text is None else read_text(text)


def _rope(path: Path) -> Rope:
    """The rotation of the model's layers. Raises StateError for one that is not known."""
    config = load({"model": str(path)})
    model = LlamaModel(path, config)
    try:
        return rope_of(model, model.rope(config), min(model.n_ctx_train, WINDOW_TOKENS_MAX))
    finally:
        model.close()


def _drift(
    report: TransformReport, measurer: Measurer, basis: Basis, rope: Rope, names: Sequence[str]
) -> None:
    """Bits and cost of each coding and of the block formats, all on the same tokens."""
    n = measurer.n_max
    floor = measurer.floor(n)
    report.figures["floor_kl"] = floor.kl
    makers: list[Callable[[KVRows], Sequence[KVRows]]] = [
        partial(_block, name=name) for name in BLOCK_FORMATS
    ]
    makers += [partial(sandwiched, basis=basis, coding=name, rope=rope) for name in names]
    costs = measurer.costs_of(makers, n)
    bits = [_block_bits(measurer, name) for name in BLOCK_FORMATS]
    bits += [_bits(measurer, basis, name, rope) for name in names]
    for name, cost, each in zip([*BLOCK_FORMATS, *names], costs, bits, strict=True):
        report.codings.append(_line(name, cost, each))
    coded_lines = report.codings[len(BLOCK_FORMATS) :]
    for fidelity in BOUNDS:
        bound = bound_of(fidelity, floor.kl)
        within = [line for line in coded_lines if line["excess"] <= bound]
        best = min(within, key=lambda line: line["bits"], default=None)
        report.figures |= {
            f"{fidelity}_coding": best["name"] if best else "none",
            f"bits_{fidelity}": best["bits"] if best else 16.0,
            f"kl_{fidelity}": best["kl"] if best else 0.0,
            f"top1_{fidelity}": best["top1"] if best else 1.0,
        }
        report.target(f"bits_{fidelity}", most=BITS_MAX[fidelity])


def _block(rows: KVRows, name: str) -> list[KVRows]:
    first, last = SINKS, len(rows) - TAIL
    parts = (rows.slice(0, first), rows.slice(last, len(rows)))
    return [parts[0], stored(rows.slice(first, last), name), parts[1]]


def _line(name: str, cost: FormatCost, bits: float) -> dict[str, Any]:
    return {
        "name": name,
        "bits": bits,
        "kl": cost.kl,
        "excess": cost.excess,
        "ci": cost.ci,
        "top1": cost.top1,
    }


def _n_numbers(rows: KVRows) -> int:
    return len(rows) * sum(plane.n_elements for plane in rows.layout.planes)


def _block_bits(measurer: Measurer, name: str) -> float:
    layout = measurer.layout
    n_bytes = sum(plane.row_bytes for plane in layout.stored_as(name).planes)
    return 8 * n_bytes / sum(plane.n_elements for plane in layout.planes)


def _bits(measurer: Measurer, basis: Basis, coding: str, rope: Rope) -> float:
    """Of a number, heads, tables and checksums included, over the windows of the second text."""
    n_bytes = n_numbers = 0
    for rows in windows_of(measurer):
        inner = rows.slice(SINKS, len(rows) - TAIL).token_major()
        n_bytes += len(coded.encode(inner, basis, coding, rope))
        n_numbers += _n_numbers(inner)
    return 8 * n_bytes / n_numbers


def _rates(report: TransformReport, measurer: Measurer, basis: Basis, rope: Rope) -> None:
    """What it takes to write rows and to bring them back, beside evaluating their tokens."""
    rows = max(windows_of(measurer), key=len).token_major()
    window = max(measurer.plan.windows, key=len)[: len(rows)]
    n_mb = _n_numbers(rows) * 2 / 1e6
    prefill_s = _prefill_s(measurer, window)
    report.figures |= {"resumed_tokens": len(rows), "prefill_s": prefill_s}
    for fidelity in BOUNDS:
        name = report.figures[f"{fidelity}_coding"]
        if name == "none":
            continue
        data = coded.encode(rows, basis, name, rope)
        encode_s = _fastest_s(partial(coded.encode, rows, basis, name, rope))
        first_s = _once_s(partial(_read, data, read_basis(basis.data), rope))
        decode_s = _fastest_s(partial(_read, data, basis, rope))
        report.figures |= {
            f"encode_{fidelity}_mb_s": n_mb / encode_s,
            f"decode_{fidelity}_mb_s": n_mb / decode_s,
            f"decode_{fidelity}_s": decode_s,
            f"decode_{fidelity}_first_s": first_s,
            f"ratio_{fidelity}": prefill_s / decode_s,
        }
        report.target(f"ratio_{fidelity}", least=RATIO_MIN)
    q4h = stored(rows, "q4h")
    report.figures["decode_q4h_s"] = _fastest_s(lambda: _transcode(q4h, rows))


def _wide(report: TransformReport, path: Path) -> None:
    """The same for the shape of an 8B model, whose prefill is taken to be slower than this model's by the numbers
    of their weights."""
    model = LlamaModel(path, load({"model": str(path)}))
    try:
        n_parameters = model.n_params
    finally:
        model.close()
    prefill_s = report.figures["prefill_s"] / report.figures["resumed_tokens"] * RESUMED_TOKENS
    prefill_s *= wide.PARAMETERS / n_parameters
    decode_s = wide.decode_s(RESUMED_TOKENS)
    report.figures |= {
        "decode_8b_s": decode_s,
        "prefill_8b_s_estimated": prefill_s,
        "ratio_8b_estimated": prefill_s / decode_s,
    }
    report.target("ratio_8b_estimated", least=RATIO_8B_MIN)


def _read(data: bytes, basis: Basis, rope: Rope) -> KVRows:
    parsed = coded.parse(data)
    return parsed.read(parsed.p0, parsed.p1, basis, rope)


def _transcode(source: KVRows, like: KVRows) -> None:
    for plane, have, want in zip(
        source.planes(), source.layout.planes, like.layout.planes, strict=True
    ):
        dispatch.transcoded(plane, have.format.name, want.format.name)


def _prefill_s(measurer: Measurer, ids: Any) -> float:
    """The time to evaluate tokens as a prompt, once."""
    scratch = measurer.scratch
    n_batch = len(scratch.context.batch.token)

    def evaluate() -> None:
        for at in range(0, len(ids), n_batch):
            scratch.context.batch.clear()
            scratch.context.batch.add(ids[at : at + n_batch], at, scratch.seq, logits_last=True)
            scratch.context.decode()

    try:
        return _once_s(evaluate)
    finally:
        scratch.context.batch.clear()
        scratch.context.seq_rm(scratch.seq)


def _once_s(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _fastest_s(work: Callable[[], Any]) -> float:
    work()
    return min(_once_s(work) for _ in range(_REPEATS))
