"""`towerctl lab bench splice`: what splicing a module in costs in quality, and saves in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lab.bench.quality.formats import check_spliceable, read_text
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import progress_bar, show_table
from towerd.engine.embedded.calibration.calibrate import calibration_text
from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS
from towerd.engine.embedded.calibration.scratch import Scratch, SteppedSequence, other_shapes
from towerd.engine.embedded.calibration.splice_meter import (
    SpliceCase,
    SpliceMeter,
    choose,
    make_cases,
)
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.core import flash_attention
from towerd.engine.embedded.restore.splice import rope_of
from towerd.errors import ConfigError
from towerd.model.llama_model import LlamaModel
from towerd.model.vocab import Vocab
from towerd.models.bundled import default_model
from towerd.settings.config import Config
from towerd.slots.blob import emit_blob
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.store.tree.module import Spans
from towerd.tiers.formats.calibration import BOUNDS, DriftSample, bound_of, interval
from towerd.tokens import Ids

PERCENTS = (0, 5, 10, 15, 25, 50, 75, 100)
"""Shares of a module's tokens that are evaluated again."""
KL_ROUNDING_MAX = 1e-4
"""Nats by which full prefill may always differ from itself, because its batches have other sizes; a
model with more noise may differ by its noise floor."""
MODULE_TOKENS_MAX, MODULE_TOKENS_QUICK = 1024, 512
CONTEXT_TOKENS_MAX = 2048
MODULES, MODULES_QUICK = 6, 2
_ROUNDS = 3
_SEQ, _SCRATCH = 0, 1


class LiveLine:
    """A sequence that stays in the context, like that of a request; operations on it are timed."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self.n = 0
        self.cut(0)

    def decode(self, ids: Ids) -> None:
        context = self._context
        for at in range(0, len(ids), len(context.batch.token)):
            part = ids[at : at + len(context.batch.token)]
            context.batch.add(part, self.n, _SEQ, logits_last=True)
            context.decode()
            self.n += len(part)

    def append(self, rows: KVRows) -> None:
        context = self._context
        context.set_state(_SCRATCH, np.asarray(emit_blob([rows], v_trans=context.v_trans)))
        context.seq_cp(_SCRATCH, _SEQ)
        context.seq_rm(_SCRATCH)
        self.n += len(rows)

    def cut(self, n: int) -> None:
        self._context.seq_rm(_SEQ, n, -1)
        self.n = n


@dataclass(slots=True)
class SpliceReport(Report):
    """A report with `lines`, one for each share of tokens that is evaluated again."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> None:
        columns = (
            ">recomputed",
            ">mean KL",
            ">excess",
            ">top-1",
            ">KL, first tokens",
            ">top-1",
            ">time saved",
        )
        show_table(
            columns,
            [
                (
                    f"{line['percent']} %",
                    f"{line['kl']:.6f}",
                    f"{line['excess']:+.6f} ± {line['ci']:.6f}",
                    f"{line['top1']:.2%}",
                    f"{line['kl_head']:.6f}",
                    f"{line['top1_head']:.2%}",
                    f"{line['saved']:.0%}",
                )
                for line in self.lines
            ],
        )
        Report.show(self)

    def as_json(self) -> dict[str, Any]:
        return {**Report.as_json(self), "drift": self.lines}


async def run(model: Path | None, quick: bool, *, text: Path | None = None) -> Report:
    """Measure; raises ConfigError, ModelError, StateError."""
    path = default_model() if model is None else model
    source = calibration_text() if text is None else read_text(text)
    report = SpliceReport("splice", path.name)
    n_module = MODULE_TOKENS_QUICK if quick else MODULE_TOKENS_MAX
    with bench_on(path, source, n_module) as bench:
        report.lines = bench.measure(MODULES_QUICK if quick else MODULES)
        figures = report.figures
        figures["floor_kl"] = bench.floor_kl
        figures["floor_top1"] = bench.floor_top1
        figures["module_tokens"] = bench.n_module
        figures["tokens_compared"] = bench.n_compared
    by_percent = {line["percent"]: line for line in report.lines}
    for fidelity in BOUNDS:
        bound = bound_of(fidelity, bench.floor_kl)
        figures[f"percent_{fidelity}"] = next(
            percent for percent, line in by_percent.items() if line["excess"] <= bound
        )
    for percent in (0, 5, 15, 50, 100):
        figures[f"kl_{percent}"] = by_percent[percent]["kl"]
        figures[f"excess_{percent}"] = by_percent[percent]["excess"]
        figures[f"top1_{percent}"] = by_percent[percent]["top1"]
    for percent in (5, 15):
        figures[f"saved_{percent}"] = by_percent[percent]["saved"]
    report.target("kl_100", most=max(KL_ROUNDING_MAX, bench.floor_kl))
    return report


@dataclass(slots=True)
class _Sums:
    """The sums of one share over all modules."""

    kl: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    kl_head: list[float] = field(default_factory=list)
    top1_head: list[float] = field(default_factory=list)
    spliced_s: float = 0.0
    prefill_s: float = 0.0

    def line(self, percent: int) -> dict[str, Any]:
        excess, ci = interval(self.excess)
        return {
            "percent": percent,
            "kl": float(np.mean(self.kl)),
            "excess": excess,
            "ci": ci,
            "top1": float(np.mean(self.top1)),
            "kl_head": float(np.mean(self.kl_head)),
            "top1_head": float(np.mean(self.top1_head)),
            "saved": 1 - self.spliced_s / self.prefill_s,
        }


class Bench:
    """Modules cut out of a text, each measured after other parts of it."""

    def __init__(
        self, context: LlamaContext, rope: Rope, *, head: Ids, text: Ids, n_module: int
    ) -> None:
        """text: ids without special tokens. Raises ConfigError if it is too short."""
        self._context = context
        self._rope = rope
        self._head = head
        self._text = text
        self.n_module = min(n_module, context.n_cells // 2, len(text) // 3)
        self.n_compared = 0
        self._noise: list[DriftSample] = []
        if self.n_module < 2 * NEXT_TOKENS:
            raise ConfigError("The text is too short, or the model's context is.")

    @property
    def floor_kl(self) -> float:
        """The model's noise on the measured tokens."""
        return float(np.mean([noise.kl for noise in self._noise]))

    @property
    def floor_top1(self) -> float:
        """The top-1 agreement that noise alone leaves."""
        return float(np.mean([noise.top1 for noise in self._noise]))

    def measure(self, n_modules: int) -> list[dict[str, Any]]:
        """One line for each of PERCENTS."""
        sums = {percent: _Sums() for percent in PERCENTS}
        starts = np.linspace(0, len(self._text) - self.n_module, n_modules).astype(int)
        with progress_bar() as bar:
            task = bar.add_task("modules", total=n_modules * len(PERCENTS))
            for start in starts.tolist():
                ids = self._text[start : start + self.n_module]
                others = self._text[start + self.n_module :], self._text[:start]
                cases = make_cases(
                    np.concatenate(others), self._head, len(ids), self._context.n_cells
                )
                meter = self._meter(ids)
                meter.prepare(cases)
                self._noise.append(meter.floor)
                self.n_compared += NEXT_TOKENS * len(cases)
                prefill_s = self._best_s(cases[-1], partial(LiveLine.decode, ids=ids))
                for percent, total in sums.items():
                    total.prefill_s += prefill_s
                    self._one(meter, cases[-1], percent, total)
                    bar.update(task, advance=1)
        return [total.line(percent) for percent, total in sums.items()]

    def _meter(self, ids: Ids) -> SpliceMeter:
        scratch = Scratch(self._context, _SCRATCH)
        return SpliceMeter(
            lambda: SteppedSequence(scratch),
            self._rope,
            rot_k=False,
            head=self._head,
            ids=ids,
            shapes=other_shapes(self._context),
        )

    def _one(self, meter: SpliceMeter, case: SpliceCase, percent: int, total: _Sums) -> None:
        spans = choose(meter.deviation, percent)
        found, head = meter.cost(spans), meter.cost(head_of(self.n_module, percent))
        total.kl.append(found.kl)
        total.excess.append(found.kl - meter.floor.kl)
        total.top1.append(found.top1)
        total.kl_head.append(head.kl)
        total.top1_head.append(head.top1)
        total.spliced_s += self._best_s(case, lambda line: meter.splice(line, spans))

    def _best_s(self, case: SpliceCase, work: Callable[[LiveLine], Any]) -> float:
        """The shortest time of `work` after the text that precedes the module."""
        line, best = LiveLine(self._context), math.inf
        line.decode(case.before)
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            work(line)
            best = min(best, time.perf_counter() - began)
            line.cut(len(case.before))
        line.cut(0)
        return best


def head_of(n: int, percent: float) -> Spans:
    """The first `percent` of `n` tokens."""
    stop = round(n * percent / 100)
    return ((0, stop),) if stop else ()


@contextmanager
def bench_on(path: Path, text: str, n_module: int) -> Iterator[Bench]:
    """A Bench on a model of its own, with modules of at most `n_module` tokens."""
    config = Config(model=path)
    model = LlamaModel(path, config)
    try:
        vocab = Vocab(model.ptr)
        n_cells = min(model.n_ctx_train, CONTEXT_TOKENS_MAX)
        ram_bytes = psutil.virtual_memory().total
        attention = flash_attention(
            config, n_head=model.n_head, n_cells=n_cells, ram_bytes=ram_bytes
        )
        config = replace(config, flash_attn=attention)
        context = LlamaContext(model, config, n_cells=n_cells, n_seqs=2)
        try:
            check_spliceable(context, model)
            rope = rope_of(model, model.rope(config), context.n_cells)
            head = np.array([vocab.bos_id] if vocab.add_bos else [], np.int32)
            ids = vocab.tokenize(text, False, False)
            yield Bench(context, rope, head=head, text=ids, n_module=n_module)
        finally:
            context.close()
    finally:
        model.close()
