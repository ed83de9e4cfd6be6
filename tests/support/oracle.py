"""Asking a real service, and the oracle: a fresh llama context that prefills everything."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from services import EmbeddedService

from towerd.engine.base import Finish, GenerateRequest, Piece, encode
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.core import flash_attention
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.model.llama_model import LlamaModel
from towerd.model.row_memory import row_memory
from towerd.model.vocab import Vocab
from towerd.settings.config import Config
from towerd.store import Handle
from towerd.store.tree.tree import PrefixTree
from towerd.tokens import Ids
from towerd.wire import Reply, Request, Writer

T = TypeVar("T")
Logits = npt.NDArray[np.float64]
GREEDY = {"temperature": 0.0, "n_probs": 4, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class TokenProbs:
    """A sampled token, its log-probability, and those of the best tokens in its place."""

    id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class Answer:
    """The result of one request."""

    ids: list[int]
    probs: list[TokenProbs]
    finish: Finish
    text: str


async def ask(service: EmbeddedService, ids: Any, n_predict: int = 8, **fields: Any) -> Answer:
    """Run a greedy request to its end."""
    ids = np.asarray(ids, np.int32)
    body = {**GREEDY, "prompt": ids, "n_predict": n_predict}
    assert service.engine.wire is not None
    wire = Request(service.engine.wire.model, "completion", encode(body))
    reply, writer = Reply(wire, 0), Writer(wire)
    request = GenerateRequest(ids=ids, reply=reply, n_predict=n_predict, **fields)
    text = ""
    finish: Finish | None = None
    async for event in service.sessions.run(request):
        if isinstance(event, Piece):
            text += event.text
        if isinstance(event, Finish):
            finish = event
    assert finish is not None
    probs = token_probs(json.loads(writer.final(reply, 0, finish.n_cached, b"")))
    return Answer(list(finish.ids), probs, finish, text)


def token_probs(reply: Mapping[str, Any]) -> list[TokenProbs]:
    """The tokens of an unstreamed /completion."""
    return [
        TokenProbs(
            token["id"],
            token["logprob"],
            {one["id"]: one["logprob"] for one in token["top_logprobs"]},
        )
        for token in reply.get("completion_probabilities", [])
    ]


def job_for(request: GenerateRequest, **state: Any) -> Job:
    """A job of which no store knows a token."""
    ids = request.ids
    path = Handle(PrefixTree(), nullcontext, ids, request.scope)
    return Job(request, ids, len(ids), path, **state)


def some_ids(n: int, seed: int = 0) -> Ids:
    """int32[n] of the bundled model's vocabulary."""
    return np.random.default_rng(seed).integers(260, 500, n).astype(np.int32)


def bounded_sequences(engine: EmbeddedEngine) -> list[LiveSeq]:
    """The live sequences of chats with a budget. Ask `inside` the inference thread."""
    return [seq for seq in engine.pool if isinstance(seq.live_set, BoundedSet)]


def live_sets(engine: EmbeddedEngine) -> list[BoundedSet]:
    """Their live sets."""
    return [bounded(seq) for seq in bounded_sequences(engine)]


async def inside(service: EmbeddedService, work: Callable[[], T]) -> T:
    """Run `work` on the inference thread."""
    return await asyncio.wrap_future(service.engine.scheduler.call(work))


async def settle(service: EmbeddedService) -> None:
    """Wait until everything recorded is exported and written; check that all counts agree."""
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    await check_integrity(service)


async def check_integrity(service: EmbeddedService) -> None:
    """Pool, context and store agree with themselves and with each other."""
    await asyncio.wrap_future(service.engine.scheduler.call(lambda: check_live(service)))
    await asyncio.to_thread(service.store.check_integrity)


def check_live(service: EmbeddedService) -> None:
    """No leaked cell: the context holds exactly what the pool accounts for."""
    pool, context = service.engine.pool, service.engine.core.context
    pool.check_integrity()
    ranking = service.tiers.ranking
    if ranking.ranks_live:
        ranking.check_live([seq.end for seq in pool if seq.end is not None])
    live = {seq.id: seq.place_next for seq in pool}
    n_own = service.engine.core.memory.n_live + 1
    for twin in range(n_own, context.n_seqs):  # of a window: it holds no more than its sequence
        assert context.pos_max(twin) < live.get(twin - n_own, 0), f"sequence {twin}"
    for seq in range(n_own):
        assert context.pos_max(seq) == live.get(seq, 0) - 1, f"sequence {seq}"
    has_state = service.engine.core.memory.kind.has_state  # which is there at its end alone
    for whole in (seq for seq in pool if seq.n and not seq.is_partial and not has_state):
        assert context.pos_min(whole.id) == 0
    for partial in (seq for seq in pool if seq.is_partial):
        rows = service.engine.core.memory.full_rows(partial.id, 0, partial.place_next)
        assert np.array_equal(rows.positions, bounded(partial).places), "places"


class Oracle:
    """Monolithic prefill in one fresh context, with the attention that a daemon gets."""

    def __init__(self, path: Path, **settings: Any) -> None:
        values: dict[str, Any] = {"threads": 1, "batch_size": 2048, "ubatch_size": 2048}
        config = Config(model=path, **(values | settings))
        self.model = LlamaModel(path, config)
        rows = row_memory(self.model, config, 1 << 40)
        attention = flash_attention(config, rows, n_head=self.model.n_head, n_cells=4096)
        config = dataclasses.replace(config, flash_attn=attention)
        self.context = LlamaContext(self.model, config, n_cells=4096, n_seqs=2)
        self._first_batch = np.zeros(0, np.int32)
        self.forbidden = sorted(Vocab(self.model.ptr).eog_ids)  # requests here ignore EOS

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def logprobs(self, ids: Ids, first: int, chunk: int = 1024) -> Logits:
        """log-softmax after each of the positions [first, len(ids)), prefilled by `chunk`."""
        self.clear()
        return self._prefill(ids, first, chunk)

    def logprobs_in(self, ids: Ids, first: int, sizes: Sequence[int]) -> Logits:
        """The same, prefilled in batches of these sizes and the rest one token at a time, which
        is the shape of a reply. The first batch stays, for the next call that begins with it."""
        at = sizes[0]
        if first < at or not np.array_equal(self._first_batch, ids[:at]):
            self.clear()
            rows = list(self._prefill(ids[:at], first, at))
            self._first_batch = ids[:at].copy()
        else:
            self.context.seq_rm(0, at)
            rows = []
        for size in (*sizes[1:], *[1] * (len(ids) - sum(sizes))):
            rows += list(self._prefill(ids[: at + size], first, size, at))
            at += size
        return np.array(rows)

    def noise(self, ids: Ids) -> float:
        """What llama.cpp itself differs by between batch splits of the same prefill: of these
        ids, or of any of a few prompts whose cells lie scattered in a shared cache.

        Cells are added up in blocks, so where a sequence's cells lie changes the
        rounding, rarely and then by much: one prompt alone would underestimate it."""
        whole = self.logprobs(ids, 0)
        splits = [self.logprobs(ids, 0, chunk) for chunk in (1, 7, 64)]
        here = max(float(np.abs(whole - split).max()) for split in splits)
        return max(here, self.scattered_noise)

    @functools.cached_property
    def scattered_noise(self) -> float:
        """The largest difference over some prompts and placements, found once per model."""
        worst = 0.0
        for seed in range(6):
            ids = np.random.default_rng(seed).integers(260, 500, 56).astype(np.int32)
            whole = self.logprobs(ids, 0)
            for filler in range(40, 240, 20):
                worst = max(worst, float(np.abs(whole - self._scattered(ids, filler)).max()))
        return worst

    def clear(self) -> None:
        """Empty the context."""
        self._first_batch = np.zeros(0, np.int32)
        for seq in range(self.context.n_seqs):
            self.context.seq_rm(seq)

    def _prefill(self, ids: Ids, first: int, chunk: int, start: int = 0) -> Logits:
        rows: list[Logits] = []
        for at in range(start, len(ids), chunk):
            part = ids[at : at + chunk]
            wanted = range(max(first - at, 0), len(part))
            self.context.batch.add(part, at, 0, logits_last=True)
            self.context.batch.logits[wanted.start : len(part)] = 1
            self.context.decode()
            rows += [_log_softmax(self.context.logits(i)) for i in wanted]
        return np.array(rows)

    def _scattered(self, ids: Ids, filler: int) -> Logits:
        """Token by token, with another sequence's cells before and in between."""
        self.clear()
        self._other(np.resize(ids[::-1], filler), 0)
        rows: list[Logits] = []
        taken = filler
        for at in range(len(ids)):
            if at % 2 == 0 and taken + 7 < 2048:
                self._other(np.full(7, ids[0]), taken)
                taken += 7
            rows += list(self._prefill(ids[: at + 1], at, 1, at))
        return np.array(rows)

    def _other(self, ids: Ids, at: int) -> None:
        self.context.batch.add(ids, at, 1, logits_last=True)
        self.context.decode()


def _log_softmax(row: npt.NDArray[np.float32]) -> Logits:
    wide = row.astype(np.float64)
    wide -= wide.max()
    return np.asarray(wide - np.log(np.exp(wide).sum()))


def check_answer(oracle: Oracle, prompt: Any, answer: Answer) -> float:
    """The reply is what monolithic prefill gives; returns the largest difference seen.

    Every reported log-probability is within twice llama.cpp's own noise, and every token is the
    most likely one or closer to it than that."""
    prompt = np.asarray(prompt, np.int32)
    ids = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    expected = oracle.logprobs(ids, len(prompt) - 1)
    bound = 2 * oracle.noise(ids) + 1e-6
    assert len(answer.probs) == len(answer.ids) == len(expected)
    worst = 0.0
    for row, probs, token in zip(expected, answer.probs, answer.ids, strict=True):
        assert probs.id == token
        allowed = np.delete(row, oracle.forbidden)
        gap = float(allowed.max() - row[token])
        assert gap <= bound, (
            f"token {token} is {gap:.2e} below the most likely, allowed {bound:.2e}"
        )
        for each, logprob in {**probs.top, token: probs.logprob}.items():
            worst = max(worst, abs(logprob - row[each]))
    assert worst <= bound, f"log-probabilities differ by {worst:.2e}, allowed {bound:.2e}"
    return worst


def check_greedy(oracle: Oracle, prompt: list[int], reply: list[int]) -> None:
    """Every token is the most likely one of monolithic prefill, or as likely within what
    splitting that prefill differently changes."""
    ids = np.array(prompt + reply[:-1], np.int32)
    first = len(prompt) - 1
    expected = oracle.logprobs(ids, first)
    noise = max(float(np.abs(oracle.logprobs(ids, first, n) - expected).max()) for n in (17, 64))
    for row, token in zip(expected, reply, strict=True):
        assert np.delete(row, oracle.forbidden).max() - row[token] <= 4 * noise + 0.02
