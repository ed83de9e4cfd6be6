"""`towerctl bench quality`: the cost of stored formats on real continuations, in the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lab.bench.plot import require
from lab.bench.quality.drift import DriftMeter, summary
from lab.bench.quality.plot import plot
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import progress_bar, show_table
from towerd.engine.embedded.calibration.calibrate import (
    CONTINUATIONS_MAX,
    calibration_text,
    plan_for,
)
from towerd.engine.embedded.calibration.measure import Measurer
from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS, WINDOW_TOKENS_MAX
from towerd.engine.embedded.calibration.scratch import Scratch
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.core import flash_attention
from towerd.engine.embedded.context.memory import open_memory
from towerd.engine.embedded.context.taps import Taps
from towerd.errors import ConfigError, NotSupported, TowerdError
from towerd.kernels.formats import STORED_FORMATS
from towerd.model.llama_model import LlamaModel
from towerd.model.row_memory import row_memory
from towerd.model.vocab import Vocab
from towerd.models.bundled import default_model
from towerd.settings.sources import load
from towerd.slots.kind import DENSE, WINDOW, StateKind
from towerd.slots.layout import KVLayout
from towerd.tiers.formats.calibration import (
    ALL_NATIVE,
    FormatChoice,
    FormatCost,
    Table,
    bits_of,
    sizes,
    uniform,
)
from towerd.tiers.formats.format_search import COARSE, calibrate

PAPER: Table = ("q4h", "q6h", "q8h")
"""The allocation of Corollary 21 (papers on Towers of Segments, section 6)."""
DRIFT_FORMATS = ("q4h", "q5h", "q6h", "q8h", "q4", "q5", "q6", "q8")
TEXT_BYTES_MAX = 16 << 20
BITS_MAX = {"near": 6.6, "small": 4.6}
"""The target for the bits of a stored value at each fidelity."""


@dataclass(slots=True)
class QualityReport(Report):
    """`tables`: one line per table, the model's noise first; `drift`: the result of
    `lab.bench.quality.drift.summary`."""

    tables: list[dict[str, Any]] = field(default_factory=list)
    drift: dict[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        columns = ("rows kept as", ">bits", ">mean KL", ">excess", ">top-1", ">perplexity")
        show_table(
            columns,
            [
                (
                    line["name"],
                    f"{line['bits']:.2f}",
                    f"{line['kl']:.5f}",
                    f"{line['excess']:+.5f} ± {line['ci']:.5f}",
                    f"{line['top1']:.2%}",
                    f"{line['ppl']:.4f} ({line['ppl'] / line['ppl_native'] - 1:+.2%})",
                )
                for line in self.tables
            ],
        )
        Report.show(self)

    def as_json(self) -> dict[str, Any]:
        return {**Report.as_json(self), "tables": self.tables, "drift": self.drift}


async def run(
    model: Path | None, quick: bool, *, text: Path | None = None, plot_path: Path | None = None
) -> Report:
    """Measure formats and level tables, then attention drift. Raises ConfigError, ModelError."""
    if plot_path is not None:
        require(plot_path)
    source = calibration_text() if text is None else read_text(text)
    path = default_model() if model is None else model
    report = QualityReport("quality", path.name)
    report.figures["text"] = "calibration.txt" if text is None else text.name
    _formats(report, path, source, 16 if quick else CONTINUATIONS_MAX)
    _drift(
        report,
        path,
        source,
        2 if quick else 4,
        DRIFT_FORMATS[:4] if quick else DRIFT_FORMATS,
        plot_path,
    )
    return report


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. Raises ConfigError."""
    try:
        if path.stat().st_size > TEXT_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {TEXT_BYTES_MAX >> 20} MiB; a part will do.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the text {path}: {error}.") from error


@contextmanager
def measurer_on(
    path: Path,
    text: str,
    n_checkpoints: int,
    taps: Taps | None = None,
    *,
    kinds: Sequence[StateKind] = (DENSE,),
    settings: Mapping[str, str] | None = None,
) -> Iterator[Measurer]:
    """A prepared Measurer on a model of its own, with the settings in force, `settings`, and the
    attention kernels that the daemon would use. Raises NotSupported for a model whose memory is of none of
    `kinds`."""
    with context_on(path, WINDOW_TOKENS_MAX, taps, settings) as (context, model):
        scratch = measurable(context, model, kinds)
        token_bytes = probe_layout(scratch).token_bytes
        vocab = Vocab(model.ptr)
        plan = plan_for(vocab, text, context.n_cells, token_bytes, n_checkpoints)
        yield Measurer(scratch, plan)


@contextmanager
def context_on(
    path: Path, n_cells: int, taps: Taps | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[LlamaContext, LlamaModel]]:
    """A context of one sequence on a model of its own, with as many cells or as the model has."""
    config = load({"model": str(path), **(settings or {})})
    model = LlamaModel(path, config)
    try:
        n_ctx = min(model.n_ctx_train, n_cells)
        rows = row_memory(model, config, psutil.virtual_memory().total)
        attention = flash_attention(config, rows, n_head=model.n_head, n_cells=n_ctx)
        config = replace(config, flash_attn=attention)
        context = LlamaContext(model, config, n_cells=n_ctx, n_seqs=1, taps=taps)
        try:
            yield context, model
        finally:
            context.close()
    finally:
        model.close()


def measurable(context: LlamaContext, model: LlamaModel, kinds: Sequence[StateKind]) -> Scratch:
    """A sequence to measure in. Raises NotSupported for a model whose memory is of none of `kinds`."""
    memory = open_memory(context, model)
    if memory.kind not in kinds:
        names = " and ".join(kind.name for kind in kinds)
        raise NotSupported(
            f"Rows of {names} attention are measured; this model is {memory.kind.name}."
        )
    window = model.n_swa if memory.kind is WINDOW else 0
    return Scratch(context, 0, cell_ext=memory.layout.cell_ext, window=window)


def probe_layout(scratch: Scratch) -> KVLayout:
    """The layout of the context's rows."""
    found = scratch.evaluate(None, 0, np.zeros(1, np.int32), logits=False, rows=True)
    assert found.rows is not None
    return found.rows.layout


def _formats(report: QualityReport, path: Path, text: str, n_checkpoints: int) -> None:
    """Run the calibration's own measurement and search, and measure every other stored format."""
    began = time.monotonic()
    with measurer_on(path, text, n_checkpoints) as measurer, progress_bar() as bar:
        layout = measurer.layout
        bits = sizes(layout)
        task = bar.add_task("formats", total=None)
        done: list[int] = []

        def evaluated(n_tokens: int) -> None:
            done.append(n_tokens)
            bar.update(task, advance=n_tokens)

        def expect(n_tokens: int) -> None:
            bar.update(task, total=sum(done) + n_tokens)

        measurer.scratch.evaluated = evaluated

        floor, grid, choices = calibrate(measurer, bits, expect)
        report.figures["calibration_s"] = time.monotonic() - began
        more = [f.name for f in STORED_FORMATS if f.name not in bits]
        more = [name for name in more if layout.stored_as(name) != layout]
        tables = {PAPER: "0=q4h,1=q6h,2=q8h"} if set(PAPER) <= set(bits) else {}
        tables |= {uniform(name): name for name in more}
        n_coarse = min(COARSE, measurer.n_max)
        extra = dict(zip(tables.values(), measurer.costs(list(tables), n_coarse), strict=True))
    size = bits | {f.name: _bits(layout, f.name) for f in STORED_FORMATS}
    lines = [
        {
            **_line("as computed: noise alone", ALL_NATIVE, grid.native, grid.native, size),
            "kl": floor.kl,
            "ci": floor.ci,
            "top1": floor.top1,
        }
    ]
    for name, choice in choices.items():
        levels = ",".join(f"{i}={f}" for i, f in enumerate(choice.levels))
        native = measurer.costs([ALL_NATIVE], choice.cost.n_tokens // NEXT_TOKENS)[0]
        lines.append(_line(f"{name}: {levels}", choice.levels, choice.cost, native, size))
        _figures(report, name, levels, choice)
    for name, cost in grid.uniform.items():
        lines.append(_line(name, uniform(name), cost, grid.native, size))
    for table, name in tables.items():
        lines.append(_line(name, table, extra[name], grid.native, size))
    report.tables = lines
    report.figures |= {
        "floor_kl": floor.kl,
        "floor_ci": floor.ci,
        "floor_top1": floor.top1,
        "floor_shape": floor.shape,
        "ppl_native": grid.native.ppl,
        "tokens_compared": floor.n_tokens,
        "ids": measurer.plan.digest(),
    }
    report.details["floor_shapes"] = dict(floor.shapes)


def _figures(report: QualityReport, name: str, levels: str, choice: FormatChoice) -> None:
    """Add the figures of one fidelity and their targets."""
    cost = choice.cost
    report.figures |= {
        f"{name}_levels": levels,
        f"{name}_bits": choice.bits,
        f"{name}_excess": cost.excess,
        f"{name}_excess_ci": cost.ci,
        f"{name}_bound": choice.bound,
        f"{name}_tokens": cost.n_tokens,
        f"kl_{name}": cost.kl,
        f"top1_{name}": cost.top1,
    }
    report.target(f"{name}_bits", most=BITS_MAX[name])
    report.target(f"{name}_excess", most=choice.bound)


def _bits(layout: KVLayout, name: str) -> float:
    n_values = sum(plane.n_elements for plane in layout.planes)
    return 8 * sum(plane.row_bytes for plane in layout.stored_as(name).planes) / n_values


def _line(
    name: str, table: Table, cost: FormatCost, native: FormatCost, bits: dict[str, float]
) -> dict[str, Any]:
    """A line of the table. native: the cost of native rows on the same tokens."""
    return {
        "name": name,
        "levels": list(table),
        "bits": bits_of(table, bits),
        "kl": cost.kl,
        "excess": cost.excess,
        "ci": cost.ci,
        "top1": cost.top1,
        "ppl": cost.ppl,
        "ppl_native": native.ppl,
        "tokens": cost.n_tokens,
    }


def _drift(
    report: QualityReport,
    path: Path,
    text: str,
    n_checkpoints: int,
    formats: tuple[str, ...],
    plot_path: Path | None,
) -> None:
    """Measure attention drift with 32-bit rows and no flash attention, so that only the error of
    the keys counts."""
    taps = Taps()
    settings = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    with measurer_on(path, text, n_checkpoints, taps, settings=settings) as measurer:
        layout = measurer.layout
        usable = [name for name in formats if layout.stored_as(name) != layout]
        if not usable:
            raise TowerdError("The rows of this model fit no stored format.")
        tables = {name: uniform(name) for name in usable}
        drift = DriftMeter(measurer, taps).measure(measurer.plan.continuations, usable, tables)
    report.drift = summary(drift)
    for key in (
        "share_under_bound",
        "share_under_whole_bound",
        "tightness_p50",
        "tightness_p99",
        "slope_bits",
        "slope_alpha",
    ):
        report.figures[key] = report.drift[key]
    report.target("share_under_whole_bound", least=1.0)
    if plot_path is not None:
        plot(drift, plot_path, report.model)
        report.figures["plot"] = str(plot_path)
