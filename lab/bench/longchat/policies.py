"""`towerctl bench longchat`: the cost of a bounded live cache, by policy, in the real engine."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.longchat import perplexity, retrieval
from lab.bench.longchat.reading import last_attention
from lab.bench.longchat.recall import index_overhead, recalls
from lab.models.random_gguf import PRESETS
from lab.texts.documents import read_meetings, read_pairs, read_text
from lab.texts.tokenizer import TextTokenizer
from towerd.cli.bench.harness.models import bench_model
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import progress_bar, show_table
from towerd.codec.prior import sample
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.models.bundled import RETRIEVAL_NAME, bundled_model, default_model
from towerd.retention.icecache import IceCacheConfig
from towerd.service import Service, open_service
from towerd.settings.config import RETENTIONS, Config
from towerd.tokens import Ids

SAMPLE = "sample.txt"
"""Name of the package's own text."""
POLICIES = tuple(name for name in RETENTIONS if LiveBudget(name).is_bounded)
TEXT_TOKENS_MAX = 8191
"""The longest text that is read at once: one token less than the longest context."""
QUICK_TEXT_TOKENS = 1023
BUDGETS = (256, 512)
QUICK_BUDGETS = (256,)
LENGTHS = (1024, 2048, 4096, 8192)
"""Lengths of prompts with facts, including the question."""
QUICK_LENGTHS = (512,)
QUICK_FACTS = 4
"""How many of the facts are asked for. Each question may evaluate its whole prompt under each policy."""
QUESTION_TOKENS = 64
N_PAIRS = 8
RECALL_TOKENS = 2048
RECALL_BUDGET = 64
RECALL_LAYER_STEP = 3
"""The default of `--recall-layer-step`."""
N_QUERIES = 8


@dataclass(slots=True)
class LongchatReport(Report):
    """`perplexity`, `retrieval`: rows of a table; the first keys of a row identify it."""

    perplexity: list[dict[str, Any]] = field(default_factory=list)
    retrieval: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> None:
        for title, rows in (("perplexity / full", self.perplexity), ("found", self.retrieval)):
            if rows:
                columns = list(dict.fromkeys(key for row in rows for key in row))
                columns = [c for c in columns if not any(isinstance(r.get(c), dict) for r in rows)]
                show_table(
                    (title, *(f">{name}" for name in columns[1:])),
                    [tuple(_cell(row.get(name)) for name in columns) for row in rows],
                )
        Report.show(self)

    def as_json(self) -> Mapping[str, Any]:
        more = {"perplexity": self.perplexity, "retrieval": self.retrieval}
        return {**Report.as_json(self), **more}


async def run(
    model: Path | None,
    quick: bool,
    *,
    text: Path | None,
    meetings: Path | None,
    pairs: Path | None,
) -> Report:
    """Perplexity, retrieval, recall and the cost of the index. Raises TowerdError."""
    # One that is small and was trained to find again what it read: quick, and told apart all the same.
    path = model or (bundled_model(RETRIEVAL_NAME) if quick else default_model())
    budgets = QUICK_BUDGETS if quick else BUDGETS
    report = LongchatReport("longchat", path.name)
    texts = {SAMPLE: sample.load().decode()} if text is None else {text.name: read_text(text)}
    (filler,) = texts.values()
    if meetings is None:
        report.details["meetings"] = "not measured: name QMSum's file with --meetings"
    else:
        texts[meetings.name] = read_meetings(meetings)
    with TextTokenizer(path) as tokenizer:
        async with _served(path) as service:
            n = min(service.engine.n_ctx - 1, QUICK_TEXT_TOKENS if quick else TEXT_TOKENS_MAX)
            windows = {
                key: tokenizer.windows(read, 1, n)[0].astype(np.int32)
                for key, read in texts.items()
            }
            await _perplexity(report, service, windows, budgets)
            await _recall(report, service, next(iter(windows.values()))[:RECALL_TOKENS])
            tasks = list(_tasks(report, tokenizer, filler, pairs, service.engine.n_ctx, quick))
            await _retrieval(report, service, tasks, budgets)
    _overhead(report, quick)
    return report


@asynccontextmanager
async def _served(path: Path) -> AsyncIterator[Service[EmbeddedEngine]]:
    """The service on a store of its own that keeps no rows, so that no budget reuses another's."""
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        config = Config(
            model=path,
            store_dir=Path(folder) / "store",
            socket=Path(folder) / "s",
            live_sequences=4,
            parallel=1,
            hot_bytes=0,
            warm_bytes=0,
            anticipate=False,
            retention="icecache",
            recall_bytes=1 << 40,
        )
        async with open_service(config) as service:
            yield service


async def _perplexity(
    report: LongchatReport,
    service: Service[EmbeddedEngine],
    windows: Mapping[str, Ids],
    budgets: Sequence[int],
) -> None:
    with progress_bar() as bar:
        total = perplexity.n_tokens(windows, POLICIES, budgets)
        task = bar.add_task("perplexity, tokens", total=total)
        full, report.perplexity = await perplexity.measure(
            service.engine, windows, POLICIES, budgets, lambda n: bar.advance(task, n)
        )
    report.figures["text_tokens"] = len(next(iter(windows.values())))
    report.figures |= {f"ppl_full {name}": value for name, value in full.items()}
    report.figures |= perplexity.worst_ratios(report.perplexity)
    for rival in ("h2o", "streaming"):
        if f"buzz_vs_{rival}_ppl" in report.figures:
            report.target(f"buzz_vs_{rival}_ppl", most=1.0)


async def _recall(report: LongchatReport, service: Service[EmbeddedEngine], ids: Ids) -> None:
    """Measure recall on the keys and the last queries of a text, in the layers that the engine
    indexes."""
    keys, queries = await last_attention(service.engine, ids, N_QUERIES)
    layers = list(IceCacheConfig(layer_step=RECALL_LAYER_STEP).anchors(len(keys)))
    found = recalls(keys[layers], queries[layers], RECALL_BUDGET)
    report.figures |= {f"recall_{way}": share for way, share in found.items()}
    report.figures["icecache_recall_vs_sequential"] = found["icecache"] / found["quest"]
    report.figures["icecache_recall_vs_ranked"] = found["icecache"] / found["ranked"]
    report.target("icecache_recall_vs_sequential", least=1.3)


def _tasks(
    report: LongchatReport,
    tokenizer: TextTokenizer,
    text: str,
    pairs: Path | None,
    n_ctx: int,
    quick: bool,
) -> list[retrieval.RetrievalTask]:
    lengths = [n for n in (QUICK_LENGTHS if quick else LENGTHS) if n <= n_ctx] or [n_ctx]
    lengths = [n - QUESTION_TOKENS for n in lengths]
    n_asked = QUICK_FACTS if quick else len(retrieval.FACTS)
    tasks = [retrieval.facts(tokenizer, text, n, n_asked) for n in lengths]
    if pairs is None:
        report.details["pairs"] = "not measured: name the key-value examples with --pairs"
        return tasks
    told = read_pairs(pairs)
    return tasks + [retrieval.pairs(tokenizer, told, n, min(N_PAIRS, n_asked)) for n in lengths]


async def _retrieval(
    report: LongchatReport,
    service: Service[EmbeddedEngine],
    tasks: Sequence[retrieval.RetrievalTask],
    budgets: Sequence[int],
) -> None:
    budgets = [n for n in budgets if n < service.engine.n_ctx]
    with progress_bar() as bar:
        n_runs = 1 + len(budgets) * len(POLICIES)
        n_asked = sum(len(each.asked) for each in tasks)
        task = bar.add_task("retrieval, questions", total=n_runs * n_asked)
        report.retrieval = await retrieval.measure(
            service, tasks, POLICIES, budgets, lambda n: bar.advance(task, n)
        )
    for budget in budgets:
        for policy in POLICIES:
            share = retrieval.share_found(report.retrieval, policy, budget)
            if share is not None:
                report.figures[f"{policy}_found_{budget}"] = share
    if "icecache_found_256" in report.figures:
        report.target("icecache_found_256", least=0.99)


def _overhead(report: LongchatReport, quick: bool) -> None:
    preset = "small" if quick else "1b"
    shape, n = PRESETS[preset], 512 if quick else 2048
    head_size = shape.head_dim or shape.n_embd // shape.n_head
    found = index_overhead(bench_model(None, preset), n, head_size, n_threads=2)
    report.figures["index_tokens"] = n
    report.figures |= found
    report.figures["index_overhead"] = found["index_s"] / found["prefill_s"]
    report.target("index_overhead", most=0.1)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
