"""`towerctl bench longchat`: what a bounded live cache costs and keeps, by policy, scope and budget."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.longchat import beyond, live, perplexity, retrieval
from lab.bench.longchat.perplexity import ReadText
from lab.bench.longchat.reading import last_attention
from lab.bench.longchat.recall import index_overhead, recalls
from lab.models.random_gguf import PRESETS
from lab.texts.documents import read_meetings, read_pairs, read_text
from lab.texts.tokenizer import Ids, TextTokenizer
from towerd.cli.bench.harness.models import bench_model
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import progress_bar, show_table, size
from towerd.codec.prior import sample
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.engine.embedded.longchat import recall as limits
from towerd.errors import TowerdError
from towerd.models.bundled import RETRIEVAL_NAME, bundled_model, default_model, has_default
from towerd.retention.icecache import IceCacheConfig
from towerd.service import Service, open_service
from towerd.settings.config import RETENTION_SCOPES, RETENTIONS, Config
from towerd.tokens import Ids as TokenIds

SAMPLE = "sample.txt"
"""Name of the package's own text."""
SAMPLE_PROSE_CHARS = 397_976
"""Where prose begins in it; before that it is code and short chats."""
POLICIES = tuple(name for name in RETENTIONS if LiveBudget(name).is_bounded)
SCOPE = "layer"
"""The scope that figures without one in their names are of: the daemon's default."""
RECALL_BUDGET = 64
N_QUERIES = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    budgets: tuple[int, ...]
    """Of the default scope; the first one of the other scopes, too."""
    prompt: int
    """Tokens of a text that are read as a prompt."""
    reply: int
    """Tokens behind it, whose perplexity counts."""
    windows: int
    """How many prompts are taken of each text."""
    read_as_reply: int
    """Tokens of a text that are read as a reply, in the default scope; 0: none."""
    documents: tuple[int, ...]
    """Tokens of the documents that are asked about."""
    asked: int
    """Questions of each kind."""
    context: int
    """Tokens of the context that a chat outgrows."""
    beyond_asked: int
    recall: int
    """Tokens whose keys are searched."""


FULL = Sizes((256, 512), 1536, 512, 2, 2048, (1024, 2048, 4096), 4, 2048, 8, 2048)
QUICK = Sizes((256, 512), 500, 96, 1, 0, (1024,), 2, 512, 3, 768)


def lives(budgets: Sequence[int], policies: Sequence[str] = POLICIES) -> list[LiveBudget]:
    """Every policy with every budget in the default scope, then with the first budget in the others, which
    make no difference to `streaming`."""
    others = [scope for scope in RETENTION_SCOPES if scope != SCOPE]
    found = [LiveBudget(name, budget, SCOPE) for budget in budgets for name in policies]
    return found + [
        LiveBudget(name, budgets[0], scope)
        for scope in others
        for name in policies
        if name != "streaming"
    ]


@dataclass(slots=True)
class LongchatReport(Report):
    """`perplexity`, `retrieval`: a row for each text or document and each budget."""

    perplexity: list[dict[str, Any]] = field(default_factory=list)
    retrieval: list[dict[str, Any]] = field(default_factory=list)
    lives: list[LiveBudget] = field(default_factory=list)

    def show(self) -> None:
        kinds = [f">{kind}" for kind in retrieval.KINDS]
        columns = ("policy", ">live", "scope", ">ppl / full", *kinds, ">peak", ">beside")
        show_table(columns, map(self._row, self.lives))
        Report.show(self)

    def as_json(self) -> Mapping[str, Any]:
        more = {"perplexity": self.perplexity, "retrieval": self.retrieval}
        return {**Report.as_json(self), **more}

    def _row(self, each: LiveBudget) -> tuple[str, ...]:
        """What a budget does: shares of what the full cache finds, bytes at most."""
        ratio = perplexity.mean_ratio(self.perplexity, "prompt", each)
        shares = [retrieval.share_found(self.retrieval, each, [kind]) for kind in retrieval.KINDS]
        place = perplexity.place_of(each)
        own = [row for row in (*self.perplexity, *self.retrieval) if place.items() <= row.items()]
        peak, aside = (
            max((row[key] for row in own if key in row), default=0)
            for key in ("peak_bytes", "aside_bytes")
        )
        cells = [_cell(ratio), *map(_cell, shares), size(peak), size(aside) if aside else "0"]
        return each.policy, str(each.tokens), each.scope, *cells


async def run(
    model: Path | None,
    quick: bool,
    *,
    text: Path | None,
    meetings: Path | None,
    pairs: Path | None,
) -> Report:
    """Perplexity, retrieval, a chat beyond its context, recall and the cost of the index; unless it is
    quick, the time a token as `live`. Raises TowerdError."""
    path, sizes = model or _default(), QUICK if quick else FULL
    report = LongchatReport("longchat", path.name)
    texts = {SAMPLE: _sample()} if text is None else {text.name: read_text(text)}
    (filler,) = texts.values()
    if meetings is not None:
        texts[meetings.name] = read_meetings(meetings)
    told = [] if pairs is None else read_pairs(pairs)
    with TextTokenizer(path) as tokenizer:
        ids = tokenizer.ids(filler)
        async with served(path) as service:
            n_ctx = service.engine.n_ctx
            report.lives = lives([n for n in sizes.budgets if n < n_ctx])
            await _perplexity(report, service, _texts(tokenizer, texts, sizes, n_ctx))
            made = [retrieval.document(tokenizer, ids, n, told) for n in sizes.documents]
            fitting = [each for each in made if each.n + retrieval.SPARE_TOKENS < n_ctx]
            await _retrieval(report, service, tokenizer, fitting, sizes.asked)
            await _recall(report, service, ids[: sizes.recall].astype(np.int32))
        await _beyond(report, path, tokenizer, ids, sizes)
    _overhead(report, quick)
    if not quick:
        await _timed(report, model)
    return report


def _default() -> Path:
    """SmolLM2, or where it was not fetched the package's model that finds again what it read."""
    return default_model() if has_default() else bundled_model(RETRIEVAL_NAME)


async def _timed(report: LongchatReport, model: Path | None) -> None:
    """The time a token, of random weights of the 1B shape without a model."""
    try:
        timed = await live.run(model, quick=False)
    except TowerdError as error:
        report.details["live"] = f"not measured: {error}"
        return
    report.figures |= timed.figures
    report.targets |= timed.targets


def _sample() -> str:
    return sample.load().decode()[SAMPLE_PROSE_CHARS:]


def _texts(
    tokenizer: TextTokenizer, texts: Mapping[str, str], sizes: Sizes, n_ctx: int
) -> list[ReadText]:
    """The windows to read: each as a prompt and a reply, the first ones also as a reply alone."""
    found = []
    n_prompt = min(sizes.prompt, n_ctx - sizes.reply - 1)
    for name, text in texts.items():
        windows = tokenizer.windows(text, sizes.windows, n_prompt + sizes.reply)
        for i, window in enumerate(windows):
            ids = window.astype(np.int32)
            found.append(ReadText(f"{name} {i}" if i else name, "prompt", ids, n_prompt))
        if sizes.read_as_reply:
            n = min(sizes.read_as_reply, n_ctx - 1)
            ids = tokenizer.windows(text, 1, n)[0].astype(np.int32)
            found.append(ReadText(name, "reply", ids, 1))
    return found


@asynccontextmanager
async def served(path: Path, ctx_size: int = 0) -> AsyncIterator[Service[EmbeddedEngine]]:
    """The service with the settings that a daemon has, on a store of its own, for one request at a time."""
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        config = Config(
            model=path,
            store_dir=Path(folder) / "store",
            socket=Path(folder) / "s",
            ctx_size=ctx_size,
            live_sequences=4,
            parallel=1,
            anticipate=False,
            retention="icecache",
        )
        async with open_service(config) as service:
            yield service


async def _perplexity(
    report: LongchatReport,
    service: Service[EmbeddedEngine],
    texts: Sequence[ReadText],
) -> None:
    of_scope = [each for each in report.lives if each.scope == SCOPE]
    ways = {"prompt": report.lives, "reply": of_scope}
    with progress_bar() as bar:
        parts = {way: [each for each in texts if each.way == way] for way in ways}
        total = sum(perplexity.n_read(parts[way], ways[way]) for way in ways)
        task = bar.add_task("perplexity, tokens", total=total)
        for way in ways:
            full, rows = await perplexity.measure(
                service, parts[way], ways[way], lambda n: bar.advance(task, n)
            )
            report.figures |= {f"ppl_full {name}": value for name, value in full.items()}
            report.perplexity += rows
    _add_perplexity(report, of_scope)


def _add_perplexity(report: LongchatReport, of_scope: Sequence[LiveBudget]) -> None:
    """The figures that have targets: of the default scope, where the prompt was read in full."""
    rows = report.perplexity
    for way, suffix in (("prompt", ""), ("reply", "_reply")):
        for rival in ("h2o", "streaming"):
            worst = perplexity.worst_over(rows, "buzz", rival, way)
            if worst is not None:
                report.figures[f"buzz_vs_{rival}{suffix}_ppl"] = worst
                if way == "prompt":
                    report.target(f"buzz_vs_{rival}_ppl", most=1.0)
    for budget in sorted({each.tokens for each in of_scope}):
        own = [each for each in of_scope if each.tokens == budget]
        ratios = {each.policy: perplexity.mean_ratio(rows, "prompt", each) for each in own}
        measured = {policy: value for policy, value in ratios.items() if value is not None}
        if measured:
            best = min(measured, key=lambda policy: measured[policy])
            report.figures[f"best_ppl_{budget}"] = measured[best]
            report.details[f"best_ppl_{budget}_policy"] = best
    if "best_ppl_256" in report.figures:
        report.target("best_ppl_256", most=1.2)


async def _recall(report: LongchatReport, service: Service[EmbeddedEngine], ids: TokenIds) -> None:
    """Measure recall on the keys and the last queries of a text, in the layers that the engine
    indexes."""
    keys, queries = await last_attention(service, ids, N_QUERIES)
    n_among_others = limits.full_among_others(service.engine.core.memory)
    budget = LiveBudget("icecache", RECALL_BUDGET)
    config = limits.served(budget, service.config, n_among_others)
    assert isinstance(config, IceCacheConfig)
    layers = list(config.anchors(len(keys)))
    found = recalls(keys[layers], queries[layers], RECALL_BUDGET)
    report.figures |= {f"recall_{way}": share for way, share in found.items()}
    report.figures["icecache_recall_vs_sequential"] = found["icecache"] / found["quest"]
    report.figures["icecache_recall_vs_ranked"] = found["icecache"] / found["ranked"]
    report.target("icecache_recall_vs_sequential", least=1.3)


async def _retrieval(
    report: LongchatReport,
    service: Service[EmbeddedEngine],
    tokenizer: TextTokenizer,
    documents: Sequence[retrieval.Document],
    n_each: int,
) -> None:
    with progress_bar() as bar:
        total = sum(retrieval.n_questions(each, report.lives, n_each) for each in documents)
        task = bar.add_task("retrieval, questions", total=total)
        for document in documents:
            report.retrieval += await retrieval.measure(
                service, tokenizer, document, report.lives, n_each, lambda n: bar.advance(task, n)
            )
    for each in report.lives:
        if each.scope != SCOPE:
            continue
        for name, kinds in (
            ("found", retrieval.TOLD),
            ("quotes", ("quotes",)),
            ("spread", ("spread",)),
        ):
            share = retrieval.share_found(report.retrieval, each, kinds)
            if share is not None:
                report.figures[f"{each.policy}_{name}_{each.tokens}"] = share
    for key, least in (
        ("icecache_found_256", 0.95),
        ("snapkv_found_512", 0.9),
        ("h2o_found_512", 0.9),
    ):
        if key in report.figures:
            report.target(key, least=least)


async def _beyond(
    report: LongchatReport, path: Path, tokenizer: TextTokenizer, filler: Ids, sizes: Sizes
) -> None:
    """A chat that outgrows its context, and the same where the context has room for it."""
    chat = beyond.long_chat(tokenizer, filler, sizes.context, sizes.beyond_asked)
    n = sum(len(tokenizer.ids(message)) for message in chat.messages)
    recalling = LiveBudget("icecache", min(sizes.budgets), SCOPE)
    room = {
        sizes.context: recalling,
        beyond.CONTEXTS * sizes.context + beyond.ROOM_TOKENS: LiveBudget(),
    }
    scores = []
    with progress_bar() as bar:
        task = bar.add_task("a chat of three contexts, tokens", total=2 * n)
        for n_ctx, budget in room.items():
            async with served(path, ctx_size=n_ctx) as service:
                scores.append(
                    await beyond.scores(
                        service, tokenizer, chat, budget, lambda n: bar.advance(task, n)
                    )
                )
    _add_beyond(report, *scores)


def _add_beyond(report: LongchatReport, found: Sequence[float], full: Sequence[float]) -> None:
    report.figures |= {"beyond_context_asked": len(full), "beyond_context_full": sum(full)}
    report.details["beyond_context_scores"] = list(found)
    share = beyond.share(found, full)
    if share is None:
        report.details["beyond_context_found"] = "not measured: the full cache finds nothing"
        return
    report.figures["beyond_context_found"] = share
    report.target("beyond_context_found", least=0.8)


def _overhead(report: LongchatReport, quick: bool) -> None:
    preset = "small" if quick else "1b"
    shape, n = PRESETS[preset], 512 if quick else 2048
    head_size = shape.head_dim or shape.n_embd // shape.n_head
    found = index_overhead(bench_model(None, preset), n, head_size, n_threads=2)
    report.figures["index_tokens"] = n
    report.figures |= found
    report.figures["index_overhead"] = found["index_s"] / found["prefill_s"]
    report.target("index_overhead", most=0.1)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
