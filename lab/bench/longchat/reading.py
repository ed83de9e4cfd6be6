"""How well a served model predicts a text that it reads under a live budget.

The text is read as if it were a reply: the budget holds from its first token on. The engine's own
parts evaluate it and drop positions where the scheduler would, in chunks as large as the budget
allows; a token of a chunk sees what it would see if it were generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from towerd.engine.base import GenerateRequest, LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.engine.embedded.run.background import nothing_to_evict
from towerd.engine.embedded.run.batching import Batching
from towerd.errors import TowerdError
from towerd.kernels import dispatch
from towerd.retention import Rows
from towerd.slots.rows import KVRows
from towerd.tokens import Ids

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Reading:
    """The result for a text of n tokens."""

    surprises: npt.NDArray[np.float64]
    """float64[n - 1]: minus the log-probability of each token but the first."""
    live: npt.NDArray[np.int64]
    """int64[n]: how many tokens each one sees, itself included."""

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.surprises.mean()))


async def read(
    engine: EmbeddedEngine, ids: Ids, live: LiveBudget, advance: Advance = lambda _: None
) -> Reading:
    """Read `ids` under a budget. The engine must be idle.

    advance: called with the number of tokens evaluated. Raises TowerdError."""
    engine.budgets.check(live)
    work = partial(_read, engine, ids, live, advance)
    return await asyncio.wrap_future(engine.scheduler.call(work))


async def last_attention(engine: EmbeddedEngine, ids: Ids, n_queries: int) -> tuple[Rows, Rows]:
    """(keys float32[layers, KV heads, n - n_queries, head size], queries float32[layers, heads,
    n_queries, head size]) of the text `ids`: its last queries, and the keys of the tokens before
    them. The engine must watch attention. Raises TowerdError."""
    live = LiveBudget("icecache", len(ids) + 1)  # all tokens stay; the last queries are observed
    engine.budgets.check(live)
    work = partial(_last_attention, engine, ids, live, n_queries)
    return await asyncio.wrap_future(engine.scheduler.call(work))


def _read(engine: EmbeddedEngine, ids: Ids, live: LiveBudget, advance: Advance) -> Reading:
    found = Reading(np.zeros(len(ids) - 1), np.zeros(len(ids), np.int64))

    def note(job: Job) -> None:
        assert job.seq is not None
        n, n_new = job.seq.n, job.n_in_batch
        found.live[n : n + n_new] = job.seq.n_cells + 1 + np.arange(n_new)
        for i, token in enumerate(job.ids[n + 1 : n + n_new + 1]):
            found.surprises[n + i] = surprise(engine.core.context.logits(i), int(token))
        advance(n_new)

    with _job(engine, ids, live, n_prompt=1) as job:
        _evaluate(engine, job, note)
    return found


def _last_attention(
    engine: EmbeddedEngine, ids: Ids, live: LiveBudget, n_queries: int
) -> tuple[Rows, Rows]:
    observer, n_keys = engine.parts.observer, len(ids) - n_queries
    assert observer is not None
    with _job(engine, ids, live, n_prompt=len(ids)) as job:
        _evaluate(engine, job, None)
        assert job.seq is not None
        queries = observer.scaled_queries(bounded(job.seq), n_keys)
        rows = engine.core.memory.rows(job.seq.id, 0, n_keys)
        assert rows is not None
        return keys_of(rows, queries.shape[-1]), queries


def _evaluate(engine: EmbeddedEngine, job: Job, note: Callable[[Job], None] | None) -> None:
    """Evaluate the tokens of `job` as the scheduler does. note: called after each chunk, while its
    logits are available; None: no logits are computed."""
    batching, batch = Batching(engine.core.context), engine.core.context.batch
    while job.n_live < job.n:
        engine.parts.hooks.of_job(job).before_step(job, nothing_to_evict)
        chunk = batching.fill([job])
        batch.logits[: batch.n] = note is not None
        engine.parts.restorer.protect(chunk)
        with engine.parts.hooks.evaluating(chunk):
            engine.core.context.decode()
        if note is not None:
            note(job)
        assert job.seq is not None
        engine.pool.append(job.seq, job.ids[job.n_live : job.n_live + job.n_in_batch])
        engine.parts.restorer.advanced(job)


def surprise(logits: npt.NDArray[np.float32], token: int) -> float:
    """Minus the log-probability of `token`."""
    most = logits.max()
    return float(np.log(np.exp(logits - most).sum(dtype=np.float64)) + most - logits[token])


def keys_of(rows: KVRows, head_size: int) -> Rows:
    """The keys of `rows`: float32[layers, KV heads, n, head size]."""
    layers = []
    for plane, values in zip(rows.layout.k, rows.k, strict=True):
        wide = dispatch.transcoded(values, plane.format.name, "f32").view(np.float32)
        layers.append(wide.reshape(len(values), -1, head_size).transpose(1, 0, 2))
    return np.stack(layers)


@contextmanager
def _job(engine: EmbeddedEngine, ids: Ids, live: LiveBudget, n_prompt: int) -> Iterator[Job]:
    """A request for `ids`, of which `n_prompt` are its prompt, with a sequence of its own, which is
    released afterwards."""
    request = GenerateRequest(ids=ids, n_predict=0, cache_prompt=False, live=live)
    ids = np.ascontiguousarray(ids, np.int32)
    job = Job(request, ids, n_prompt, engine.store.hold(ids, request.scope))

    def evict() -> bool:
        idle = engine.pool.idle_lru()
        if idle is not None:
            engine.parts.restorer.drop(idle)
        return idle is not None

    restorer = engine.parts.restorer
    if not restorer.begin(job, restorer.find(job), len(ids), evict):
        raise TowerdError("The engine has no sequence free: it has other requests to serve.")
    try:
        yield job
    finally:
        engine.core.context.batch.clear()
        if job.seq is not None:
            engine.pool.drop(job.seq)
