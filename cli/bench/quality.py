"""`towerctl bench quality`: what stored formats cost on real continuations, through the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from towerd.cli.bench.drift import DriftMeter, summary
from towerd.cli.bench.drift_plot import plot, require
from towerd.cli.bench.report import Report
from towerd.cli.output import progress_bar, show_table
from towerd.config import load
from towerd.engine.embedded.calibrate import calibration_text, plan_for
from towerd.engine.embedded.context import LlamaContext
from towerd.engine.embedded.measure import WINDOW_TOKENS_MAX, Measurer, Scratch
from towerd.engine.embedded.model import LlamaModel
from towerd.engine.embedded.taps import Taps
from towerd.engine.embedded.vocab import Vocab
from towerd.errors import ConfigError, TowerdError
from towerd.kernels.formats import STORED_FORMATS
from towerd.models.bundled import bundled_model
from towerd.slots.layout import NATIVE, KVLayout
from towerd.tiers.calibration import BOUNDS, Cost, Table, bits_of, calibrate, grid_tables, sizes
from towerd.tiers.levels import uniform

PAPER: Table = ("q4h", "q6h", "q8h")
"""The allocation of Corollary 21 (papers on Towers of Segments, section 6)."""
DRIFT_FORMATS = ("q4h", "q5h", "q6h", "q8h", "q4", "q5", "q6", "q8")
TEXT_BYTES_MAX = 16 << 20


@dataclass(slots=True)
class QualityReport(Report):
    """`tables`: a line each; `drift`: what `towerd.cli.bench.drift.summary` found."""

    tables: list[dict[str, Any]] = field(default_factory=list)
    drift: dict[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        columns = ("table", ">bits", ">mean KL", ">top-1", ">perplexity", ">against native")
        native = self.tables[0]["ppl"]
        show_table(
            columns,
            [
                (
                    line["name"],
                    f"{line['bits']:.2f}",
                    f"{line['kl']:.5f}",
                    f"{line['top1']:.2%}",
                    f"{line['ppl']:.4f}",
                    f"{line['ppl'] / native - 1:+.2%}",
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
    path = bundled_model() if model is None else model
    report = QualityReport("quality", path.name)
    report.figures["text"] = "calibration.txt" if text is None else text.name
    _formats(report, path, source, 8 if quick else 24)
    _drift(report, path, source, 2 if quick else 4, DRIFT_FORMATS[:4] if quick else DRIFT_FORMATS,
           plot_path)  # fmt: skip
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
    path: Path, text: str, n_checkpoints: int, taps: Taps | None = None, **settings: str
) -> Iterator[Measurer]:
    """A prepared Measurer on a model of its own, with the settings in force and `settings`."""
    config = load({"model": str(path), **settings})
    model = LlamaModel(path, config)
    try:
        vocab = Vocab(model.ptr)
        n_ctx = min(model.n_ctx_train, WINDOW_TOKENS_MAX)
        context = LlamaContext(model, config, n_cells=n_ctx, n_seqs=1, taps=taps)
        try:
            scratch = Scratch(context, 0)
            token_bytes = probe_layout(scratch).token_bytes
            measurer = Measurer(scratch, plan_for(vocab, text, n_ctx, token_bytes, n_checkpoints))
            measurer.prepare()
            yield measurer
        finally:
            context.close()
    finally:
        model.close()


def probe_layout(scratch: Scratch) -> KVLayout:
    """What the context's rows look like."""
    found = scratch.evaluate(None, 0, np.zeros(1, np.int32), logits=False, rows=True)
    assert found.rows is not None
    return found.rows.layout


def _formats(report: QualityReport, path: Path, text: str, n_checkpoints: int) -> None:
    """The calibration's own measurement and search, and every stored format besides."""
    with measurer_on(path, text, n_checkpoints) as measurer, progress_bar((), quiet=False) as bar:
        layout = measurer.layout
        bits = sizes(layout)
        more = [f.name for f in STORED_FORMATS if f.name not in bits]
        more = [name for name in more if layout.stored_as(name) != layout]
        tables = {PAPER: "0=q4h,1=q6h,2=q8h"} if set(PAPER) <= set(bits) else {}
        tables |= {uniform(name): name for name in more}
        n_tables = len(grid_tables([*bits][:-1])) + len(tables) + 2
        task = bar.add_task("formats", total=n_tables * measurer.plan.n_tokens)
        measurer.progress = lambda n: bar.update(task, advance=n)
        grid, choices = calibrate(measurer, bits)
        extra = dict(zip(tables.values(), measurer(list(tables)), strict=True))
    size = bits | {f.name: _bits(layout, f.name) for f in STORED_FORMATS}
    lines = [_line(NATIVE, uniform(NATIVE), grid.native, size)]
    lines += [_line(name, uniform(name), cost, size) for name, cost in grid.uniform.items()]
    lines += [_line(name, table, extra[name], size) for table, name in tables.items()]
    for name, choice in choices.items():
        levels = ",".join(f"{i}={f}" for i, f in enumerate(choice.levels))
        lines.append(_line(f"{name}: {levels}", choice.levels, choice.cost, size))
        report.figures[f"{name}_levels"] = levels
        report.figures[f"{name}_bits"] = choice.bits
        report.figures[f"kl_{name}"] = choice.cost.kl
        report.figures[f"top1_{name}"] = choice.cost.top1
        report.target(f"kl_{name}", most=BOUNDS[name])
    report.tables = lines
    report.figures["ppl_native"] = grid.native.ppl
    report.figures["tokens_compared"] = measurer.plan.n_tokens
    report.figures["ids"] = measurer.plan.digest()


def _bits(layout: KVLayout, name: str) -> float:
    n_values = sum(plane.n_elements for plane in layout.planes)
    return 8 * sum(plane.row_bytes for plane in layout.stored_as(name).planes) / n_values


def _line(name: str, table: Table, cost: Cost, bits: dict[str, float]) -> dict[str, Any]:
    return {
        "name": name,
        "levels": list(table),
        "bits": bits_of(table, bits),
        "kl": cost.kl,
        "top1": cost.top1,
        "ppl": cost.ppl,
    }


def _drift(
    report: QualityReport,
    path: Path,
    text: str,
    n_checkpoints: int,
    formats: tuple[str, ...],
    plot_path: Path | None,
) -> None:
    """Attention drift: 32-bit rows and no flash attention, so that only the keys' error shows."""
    taps = Taps()
    settings = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    with measurer_on(path, text, n_checkpoints, taps, **settings) as measurer:
        layout = measurer.layout
        usable = [name for name in formats if layout.stored_as(name) != layout]
        if not usable:
            raise TowerdError("The rows of this model fit no stored format.")
        tables = {name: uniform(name) for name in usable}
        drift = DriftMeter(measurer, taps).measure(measurer.plan.checkpoints, usable, tables)
    report.drift = summary(drift)
    for key in ("share_under_bound", "share_under_whole_bound", "tightness_p50", "tightness_p99",
                "slope_bits", "slope_alpha"):  # fmt: skip
        report.figures[key] = report.drift[key]
    report.target("share_under_whole_bound", least=1.0)
    if plot_path is not None:
        plot(drift, plot_path, report.model)
        report.figures["plot"] = str(plot_path)
