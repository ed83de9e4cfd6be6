"""`towerctl bench transform`: bits and drift of transform-coded rows on other text than they were learned from, and
what it takes to bring them back.

Rows of the first text are what the basis is learned from; those of the second are coded, but for the first and the
last ones of each prefix, and tokens after them are evaluated over native and over decoded rows.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.bench.quality.formats import context_on, measurer_on, read_text
from lab.bench.transform import wide
from lab.bench.transform.resume import Reader, ResumeTimes, repeated, resume_times, seconds
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import progress_bar, show_table
from towerd.cli.progress import Lines
from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis, read_basis
from towerd.codec.rows.learn import Rounding
from towerd.engine.embedded.calibration.calibrate import calibration_text
from towerd.engine.embedded.calibration.measure import Measurer
from towerd.engine.embedded.calibration.measure_plan import WINDOW_TOKENS_MAX
from towerd.engine.embedded.calibration.transform import group_layers
from towerd.engine.embedded.calibration.transform_basis import learned, sandwiched, windows_of
from towerd.engine.moving.rotation import rope_of
from towerd.model.llama_model import LlamaModel
from towerd.models.bundled import default_model
from towerd.settings.sources import load
from towerd.slots.blob import emit_blob
from towerd.slots.kind import DENSE, WINDOW
from towerd.slots.layout import KVLayout
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import BOUNDS, FormatCost, bound_of, stored
from towerd.tiers.shrink import SINKS, TAIL
from towerd.tokens import Ids

if TYPE_CHECKING:
    from rich.progress import Progress

STEPS = (0.15, 0.18, 0.22, 0.27, 0.5, 0.65, 0.85)
STEPS_QUICK = (0.18, 0.22, 0.65)
"""Of the root mean variance of weighted numbers."""
BLOCK_FORMATS = ("q8h", "q5h", "q4h")
BITS_MAX = {"near": 2.6, "small": 1.3}
RATIO_MIN = 5.0
RATIO_8B_MIN = 15.0
KINDS = (DENSE, WINDOW)
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class BenchSize:
    """Continuations that are measured on the second text, and weighed and learned from on the first one; steps; the
    share of each text that is used; tokens that are resumed; layers of the 8B shape, 0: none."""

    n_measured: int
    n_weighed: int
    n_windows: int
    steps: tuple[float, ...]
    share: float
    resumed: tuple[int, ...]
    wide_layers: int


FULL = BenchSize(16, 8, 40, STEPS, 1.0, (2048, 7000), 2)
QUICK = BenchSize(4, 2, 8, STEPS_QUICK, 0.45, (2048,), 0)


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
    layers: int | None = None,
) -> Report:
    """Learn, then measure. layers: of a group; None: as a daemon would choose. Raises ConfigError, ModelError, CodecError, NotSupported."""
    size = QUICK if quick else FULL
    path = default_model() if model is None else model
    first, second = (part[: int(size.share * len(part))] for part in texts(learn_text, text))
    report = TransformReport("transform", path.name)
    codings = {f"step {step:g}": Rounding(step) for step in size.steps}
    rope = rope_of_model(path)
    began = time.monotonic()
    with progress_bar() as bar:
        said = Said(bar)
        with measurer_on(path, first, size.n_windows, kinds=KINDS) as measurer:
            said.phase("evaluating the text to learn from", measurer)
            n_rows = sum(map(len, windows_of(measurer)))
            report.figures["learned_tokens"] = n_rows
            layers = layers or group_layers(measurer.layout, n_rows)
            identity = hashlib.blake2b(path.name.encode(), digest_size=32).digest()
            said.phase("weighing groups of layers", measurer)
            basis = learned(measurer, rope, codings, layers, size.n_weighed, identity)
        report.figures |= {
            "learn_s": time.monotonic() - began,
            "group_layers": layers,
            "basis_mb": basis.nbytes / 1e6,
        }
        with measurer_on(path, second, size.n_measured, kinds=KINDS) as measurer:
            said.phase("measuring drift", measurer)
            _drift(report, measurer, basis, rope, [*codings])
            rows = max(windows_of(measurer), key=len).token_major()
            ids = max(measurer.plan.windows, key=len)[: len(rows)]
        said.phase("bringing rows back")
        _times(report, path, rows, ids, basis, rope, size.resumed)
        if size.wide_layers:
            said.phase("an 8B model's shape")
            _wide(report, size.resumed, size.wide_layers)
    return report


class Said:
    """Shows what is done, and how many tokens were evaluated for it."""

    def __init__(self, bar: Lines | Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def phase(self, name: str, measurer: Measurer | None = None) -> None:
        """From now on this is done."""
        n_done = 0

        def evaluated(n: int) -> None:
            nonlocal n_done
            n_done += n
            self._bar.update(self._task, description=f"{name} ({n_done:,} tokens)")

        self._bar.update(self._task, description=name)
        if measurer is not None:
            measurer.scratch.evaluated = evaluated


def texts(learn_text: Path | None, text: Path | None) -> tuple[str, str]:
    """The text to learn from and the one to measure on: by themselves two thirds and the rest of the calibration
    text. Raises ConfigError."""
    whole = calibration_text()
    cut = 2 * len(whole) // 3
    first = whole[:cut] if learn_text is None else read_text(learn_text)
    return first, whole[cut:] if text is None else read_text(text)


def rope_of_model(path: Path) -> Rope:
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
    bits = [{"": _block_bits(measurer, name)} for name in BLOCK_FORMATS]
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
            **{
                f"bits_{fidelity}{part}": best[f"bits{part}"] if best else 16.0
                for part in ("", "_full", "_window")
                if f"bits{part}" in coded_lines[0]
            },
            f"kl_{fidelity}": best["kl"] if best else 0.0,
            f"top1_{fidelity}": best["top1"] if best else 1.0,
        }
        report.target(f"bits_{fidelity}", most=BITS_MAX[fidelity])


def _block(rows: KVRows, name: str) -> list[KVRows]:
    first, last = SINKS, len(rows) - TAIL
    parts = (rows.slice(0, first), rows.slice(last, len(rows)))
    return [parts[0], stored(rows.slice(first, last), name), parts[1]]


def _line(name: str, cost: FormatCost, bits: dict[str, float]) -> dict[str, Any]:
    return {
        "name": name,
        **{f"bits{part}": each for part, each in bits.items()},
        "kl": cost.kl,
        "excess": cost.excess,
        "ci": cost.ci,
        "top1": cost.top1,
    }


def _block_bits(measurer: Measurer, name: str) -> float:
    layout = measurer.layout
    n_bytes = sum(plane.row_bytes for plane in layout.stored_as(name).planes)
    return 8 * n_bytes / sum(plane.n_elements for plane in layout.planes)


def _bits(measurer: Measurer, basis: Basis, coding: str, rope: Rope) -> dict[str, float]:
    """Of a number, heads, tables and checksums included, over the windows of the second text: of all layers, and
    without heads of those of each cache if there are two."""
    n_bytes, n_numbers, layout = 0, 0, basis.layout
    of_groups = np.zeros(len(basis.groups))
    for rows in windows_of(measurer):
        inner = rows.slice(SINKS, len(rows) - TAIL).token_major()
        data = coded.encode(inner, basis, coding, rope)
        n_bytes += len(data)
        of_groups += coded.parse(data).table["n_bytes"].sum(axis=0)[: len(of_groups)]
        n_numbers += len(inner)
    width = sum(plane.n_elements for plane in layout.planes)
    found = {"": 8 * n_bytes / n_numbers / width}
    if layout.n_window:
        n_full = layout.n_layer - layout.n_window
        is_full = [group.planes[0] % layout.n_layer < n_full for group in basis.groups]
        for name, wanted in (("_full", True), ("_window", False)):
            which = [i for i, full in enumerate(is_full) if full == wanted]
            planes = [plane for i in which for plane in basis.groups[i].planes]
            each = sum(layout.planes[plane].n_elements for plane in planes)
            found[name] = 8 * float(of_groups[which].sum()) / n_numbers / each
    return found


def _times(
    report: TransformReport,
    path: Path,
    rows: KVRows,
    ids: Ids,
    basis: Basis,
    rope: Rope,
    marks: tuple[int, ...],
) -> None:
    """What it takes to write rows and to bring them back, beside evaluating their tokens."""
    figures, few = report.figures, rows.slice(0, min(len(rows), 512))
    n_mb = len(few) * sum(plane.n_elements for plane in rows.layout.planes) * 2 / 1e6
    figures["open_basis_s"] = seconds(lambda: read_basis(basis.data))
    readers: dict[str, Reader] = {}
    with context_on(path, max(marks) + 1) as (context, _):
        marks = tuple(sorted({min(mark, context.n_cells - 1) for mark in marks}))
        many = repeated(rows, marks[-1])
        for fidelity in BOUNDS:
            name = figures[f"{fidelity}_coding"]
            if name != "none":
                encode_s = _fastest_s(partial(coded.encode, few, basis, name, rope))
                figures[f"encode_{fidelity}_mb_s"] = n_mb / encode_s
                data = coded.encode(many, basis, name, rope)
                readers[fidelity] = _coded_reader(data, basis, rope, context.v_trans)
        readers["q4h"] = _stored_reader(stored(many, "q4h"), rows.layout, context.v_trans)
        for times in resume_times(context, ids, readers, marks):
            _resumed(report, times, len(many) * n_mb / len(few))


def _coded_reader(data: bytes, basis: Basis, rope: Rope, v_trans: bool) -> Reader:
    parsed = coded.parse(data)

    def read(p0: int, p1: int) -> Any:
        return emit_blob([parsed.read(p0, p1, basis, rope)], v_trans=v_trans)

    return read


def _stored_reader(rows: KVRows, layout: KVLayout, v_trans: bool) -> Reader:
    return lambda p0, p1: emit_blob([rows.slice(p0, p1)], layout=layout, v_trans=v_trans)


def _resumed(report: TransformReport, times: ResumeTimes, n_mb: float) -> None:
    n = times.n_tokens
    report.figures |= {f"prefill_{n}_s": times.prefill_s, f"append_{n}_s": times.append_s}
    for name, read_s in times.read_s.items():
        report.figures |= {f"read_{name}_{n}_s": read_s, f"ratio_{name}_{n}": times.ratio(name)}
        if name in BOUNDS:
            report.target(f"ratio_{name}_{n}", least=RATIO_MIN)
            report.figures[f"decode_{name}_mb_s"] = n_mb / read_s
    if "near" in times.read_s:
        so_far = float(report.figures.get("ratio", math.inf))
        report.figures["ratio"] = min(so_far, times.ratio("near"))
        report.target("ratio", least=RATIO_MIN)


def _wide(report: TransformReport, marks: tuple[int, ...], n_layers: int) -> None:
    """The same for the shape of an 8B model: layers of random weights, of which all others take as much."""
    prefill_s, read_s, q4h_s = wide.seconds_a_token(n_layers)
    report.figures |= {
        "prefill_8b_token_ms": prefill_s * 1e3,
        "read_8b_token_ms": read_s * 1e3,
        "read_q4h_8b_token_ms": q4h_s * 1e3,
        "ratio_8b": prefill_s / read_s,
    }
    report.target("ratio_8b", least=RATIO_8B_MIN)


def _fastest_s(work: Callable[[], Any]) -> float:
    work()
    return min(seconds(work) for _ in range(_REPEATS))
