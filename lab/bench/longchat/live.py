"""`towerctl bench longchat --live`: the time per token in a long chat with a live budget.

Prefilling 32k tokens takes a CPU ten minutes or more, and the time per token does not depend on the
contents of the rows: random rows are written into the cache, and the chat continues from there. Its last
length is measured twice: with a store that keeps no rows, and with all of them in the store.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lab.bench.longchat.reading import bytes_aside
from towerd.cli.bench.harness.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.output import progress_bar
from towerd.engine.base import GenerateRequest, LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.errors import TowerdError
from towerd.service import Service, open_service
from towerd.settings.config import Config
from towerd.slots.blob import emit_blob
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows
from towerd.tokens import Ids, Provenance

LENGTHS = (4096, 8192, 16384, 32768)
BUDGET = 2048
QUICK_LENGTHS = (512, 1024)
QUICK_BUDGET = 128
SCOPE = "layer"
MESSAGE_TOKENS = 32
"""Length of the user's message after the text."""
REPLY_TOKENS = 128
PREFILL_TOKENS = 512
_FILL_TOKENS = 1024
_DISK_BYTES = 8 << 30
"""For recalled rows where the store keeps none."""


@dataclass(frozen=True, slots=True)
class TimedReply:
    """Measurements of one reply: milliseconds per output token and for the prompt, and what was
    live at its end."""

    token_ms: float
    prompt_ms: float
    live_bytes: int
    aside_bytes: int
    n_recallable: int
    """Tokens that are live or can be recalled."""
    index_s: float
    choose_s: float


async def run(model: Path | None, quick: bool) -> Report:
    """Time per output token at each length, with the full cache and with IceCache, and the RAM beside its
    live rows. Raises TowerdError if single positions of the model's memory cannot be dropped."""
    path = bench_model(model, "small" if quick else "1b")
    lengths, budget = (QUICK_LENGTHS, QUICK_BUDGET) if quick else (LENGTHS, BUDGET)
    report = Report("longchat --live", path.name)
    report.figures |= {"live_budget": budget, "reply_tokens": REPLY_TOKENS}
    ids = random_prompt(np.random.default_rng(0), lengths[-1] + 1024, vocab_size(path))
    live = LiveBudget("icecache", budget, SCOPE)
    full: dict[int, TimedReply] = {}
    found: dict[int, TimedReply] = {}
    with progress_bar() as bar:
        task = bar.add_task("time a token, chats", total=2 * len(lengths) + 2)
        async with _engine(path, "none", budget, lengths[-1]) as service:
            alone = await _turn(service, ids[-PREFILL_TOKENS:], LiveBudget())
            token_prefill_ms = alone.prompt_ms / PREFILL_TOKENS
            bar.advance(task)
            for n in lengths:
                await _fill(service.engine, ids[:n])
                full[n] = await _turn(service, ids[: n + MESSAGE_TOKENS], LiveBudget())
                bar.advance(task)
        report.figures["prefill_token_ms"] = token_prefill_ms
        async with _engine(path, "icecache", budget, lengths[-1]) as service:
            for n in lengths:
                await _fill(service.engine, ids[:n])
                found[n] = await _turn(service, ids[: n + MESSAGE_TOKENS], live)
                _add(report, n, full[n], found[n], token_prefill_ms)
                bar.advance(task)
        _add_aside(report, "aside_ratio", 0.35, found[lengths[-1]], full[lengths[-1]])
        async with _engine(path, "icecache", budget, lengths[-1], stores=True) as service:
            stored = await _stored_turn(service, ids[: lengths[-1] + MESSAGE_TOKENS], live)
            report.figures["stored_bytes"] = service.engine.stats()["bytes_out"]
            bar.advance(task)
        _add_aside(report, "aside_ratio_stored", 0.15, stored, full[lengths[-1]])
    last = lengths[-1] // 1024
    report.target(f"tpot_speedup_{last}k", least=3)
    report.figures["index_overhead"] = max(
        report.figures[f"index_overhead_{n // 1024}k"] for n in lengths if n >= 1024
    )
    report.target("index_overhead", most=0.1)
    return report


def _add_aside(report: Report, key: str, most: float, found: TimedReply, full: TimedReply) -> None:
    """The RAM beside the live rows over all rows of the chat, and what share of it can be recalled for
    that."""
    report.figures[key] = found.aside_bytes / full.live_bytes
    report.figures[key.replace("aside_ratio", "recallable")] = (
        found.n_recallable / full.n_recallable
    )
    report.target(key, most=most)


def _add(
    report: Report, n: int, full: TimedReply, found: TimedReply, token_prefill_ms: float
) -> None:
    if n < 1024:
        return
    name = f"{n // 1024}k"
    report.figures |= {
        f"tpot_full_ms_{name}": full.token_ms,
        f"tpot_live_ms_{name}": found.token_ms,
        f"tpot_speedup_{name}": full.token_ms / found.token_ms,
        f"live_bytes_full_{name}": full.live_bytes,
        f"live_bytes_{name}": found.live_bytes,
        f"aside_bytes_{name}": found.aside_bytes,
        f"index_overhead_{name}": found.index_s * 1e3 / (n * token_prefill_ms),
        f"choose_overhead_{name}": found.choose_s * 1e3 / (n * token_prefill_ms),
    }


@asynccontextmanager
async def _engine(
    path: Path, retention: str, budget: int, n_max: int, *, stores: bool = False
) -> AsyncIterator[Service[EmbeddedEngine]]:
    """The service as a daemon has it, for one chat. stores: whether its store keeps rows"""
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        size = n_max + 2 * _FILL_TOKENS
        config = Config(
            model=path,
            store_dir=Path(folder) / "store",
            socket=Path(folder) / "s",
            ctx_size=size,
            live_tokens=size,
            live_sequences=2,
            parallel=1,
            hot_bytes=-1 if stores else 0,
            warm_bytes=-1 if stores else 0,
            recall_disk_bytes=-1 if stores else _DISK_BYTES,
            anticipate=False,
            retention=retention,
            live_budget=budget if retention == "icecache" else 0,
        )
        async with open_service(config) as service:
            yield service


async def _fill(engine: EmbeddedEngine, ids: Ids) -> None:
    """Make a chat of these tokens live, with random rows."""
    layout = engine.core.layout
    if not engine.core.memory.kind.can_slice or not layout.k:
        raise TowerdError("bench longchat --live needs a model of dense attention.")

    def open_it() -> None:
        for seq in list(engine.pool):
            engine.pool.drop(seq)
        engine.pool.open("local", len(ids) + 2 * _FILL_TOKENS)

    def fill(first: int, rows: KVRows) -> None:
        (seq,) = engine.pool
        blob = np.asarray(emit_blob([rows], v_trans=engine.core.context.v_trans))
        engine.core.memory.append(seq.id, blob, is_empty=first == 0)
        part = ids[first : first + len(rows)]
        engine.pool.append(seq, part, np.full(len(part), Provenance.EXACT, np.uint8))

    await asyncio.wrap_future(engine.scheduler.call(open_it))
    for first in range(0, len(ids), _FILL_TOKENS):
        n = min(_FILL_TOKENS, len(ids) - first)
        rows = await asyncio.to_thread(random_rows, layout, first, n)
        await asyncio.wrap_future(engine.scheduler.call(partial(fill, first, rows)))


def random_rows(layout: KVLayout, p0: int, n: int) -> KVRows:
    """Standard normal rows of positions [p0, p0 + n) of an f16 cache. Raises TowerdError for a
    cache of another type."""
    chance = np.random.default_rng(p0)
    planes = []
    for plane in layout.planes:
        if plane.format.name != "f16":
            raise TowerdError("bench longchat --live writes f16 rows only.")
        values = chance.standard_normal((n, plane.n_elements), dtype=np.float32)
        planes.append(values.astype(np.float16).view(np.uint8))
    cut = layout.n_layer
    positions = np.arange(p0, p0 + n, dtype=np.int32)
    return KVRows(layout, positions, tuple(planes[:cut]), tuple(planes[cut:]))


async def _turn(service: Service[EmbeddedEngine], ids: Ids, live: LiveBudget) -> TimedReply:
    """Generate a reply to the prompt `ids`."""
    engine = service.engine
    before = engine.stats()
    fields = {"temperature": 0, "ignore_eos": True}
    request = GenerateRequest(ids=ids, fields=fields, n_predict=REPLY_TOKENS, live=live)
    finish = await service.sessions.run_quietly(request)
    assert finish is not None
    after = engine.stats()

    def live_sizes() -> tuple[int, int]:
        seq = max(engine.pool, key=lambda each: each.n)
        if not isinstance(seq.live_set, BoundedSet):
            return seq.n_cells, seq.n
        found = np.union1d(seq.live_set.kept, seq.live_set.offloaded.positions)
        return seq.n_cells, len(found)

    n_cells, n_recallable = await asyncio.wrap_future(engine.scheduler.call(live_sizes))
    return TimedReply(
        finish.timings.predicted_ms / max(1, finish.timings.predicted_n - 1),
        finish.timings.prompt_ms,
        n_cells * engine.core.layout.token_bytes,
        await bytes_aside(engine, live),
        n_recallable,
        float(after.get("recall_index_s", 0) - before.get("recall_index_s", 0)),
        float(after.get("recall_choose_s", 0) - before.get("recall_choose_s", 0)),
    )


async def _stored_turn(service: Service[EmbeddedEngine], ids: Ids, live: LiveBudget) -> TimedReply:
    """As `_turn`, of a chat whose rows have reached the store by then."""
    engine = service.engine
    await _fill(engine, ids[:-MESSAGE_TOKENS])
    request = GenerateRequest(ids=ids[: 1 - MESSAGE_TOKENS], n_predict=0)
    await service.sessions.run_quietly(request)
    await asyncio.wrap_future(engine.scheduler.settled())
    return await _turn(service, ids, live)
