"""How well a served model predicts a text under a live budget.

The text is given to the engine in place of the tokens that it would sample: a request whose reply says
its tokens one after the other, and notes how probable each was. Everything else is what any request does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from towerd.engine.base import GenerateRequest, LiveBudget
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.kernels import dispatch
from towerd.retention import Rows, Signal, open_retention, retention_config
from towerd.service import Service
from towerd.slots.rows import KVRows
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.wire import Reply

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Reading:
    """The result for a reply of n tokens."""

    surprises: npt.NDArray[np.float64]
    """float64[n]: minus the log-probability of each token."""
    live: npt.NDArray[np.int64]
    """int64[n]: how many tokens were live when each was sampled."""
    aside_bytes: int
    """RAM beside the live rows at the end."""

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.surprises.mean()))


@dataclass(slots=True)
class GivenReply:
    """Stands for `towerd.wire.Reply`: "samples" the given tokens. The engine must run this request only."""

    engine: EmbeddedEngine
    ids: Ids
    advance: Advance
    surprises: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    request: None = None
    has_new_line: bool = False
    stopping_word: bytes = b""
    stop: str = ""

    @property
    def n_kept(self) -> int:
        """As `Reply.n_kept`."""
        return len(self.surprises)

    def accept_prompt(self, ids: Ids) -> None:
        """As `Reply.accept_prompt`."""

    def started(self, n_cached: int, n_processed: int, prompt_ms: float) -> None:
        """As `Reply.started`."""

    def steps(
        self, ctx: int, index: int, draft: Ids, n_room: int, synthetic: Any = ()
    ) -> list[Any]:
        """As `Reply.steps`: the next of the given tokens."""
        (job,) = self.engine.scheduler.active
        assert job.seq is not None
        token = int(self.ids[len(self.surprises)])
        self.surprises.append(surprise(self.engine.core.context.logits(index), token))
        self.live.append(job.seq.n_cells)
        self.advance(1)
        self.stop = "limit" if len(self.surprises) == len(self.ids) else ""
        return [SimpleNamespace(token=token, text=b"", stop=self.stop)]

    def limit(self, truncated: bool) -> None:
        """As `Reply.limit`."""

    def truncate(self) -> None:
        """As `Reply.truncate`."""


async def read(
    service: Service[EmbeddedEngine],
    prompt: Ids,
    reply: Ids,
    live: LiveBudget,
    advance: Advance = lambda _: None,
) -> Reading:
    """Read `reply` behind `prompt` under a budget. The service must have no other requests. A policy that
    goes by all queries so far has the prompt evaluated anew: stored rows bring none.

    advance: called with the number of tokens that were read. Raises TowerdError."""
    service.engine.budgets.check(live)
    given = GivenReply(service.engine, np.asarray(reply, np.int32), advance)
    request = GenerateRequest(
        ids=np.ascontiguousarray(prompt, np.int32),
        reply=cast("Reply", given),
        n_predict=len(reply),
        live=live,
        cache_prompt=not counts_all(live),
    )
    async for _ in service.sessions.run(request):
        pass
    aside_bytes = await bytes_aside(service.engine, live)
    return Reading(np.array(given.surprises), np.array(given.live), aside_bytes)


def counts_all(live: LiveBudget) -> bool:
    """Whether a policy goes by all queries so far."""
    if not live.is_bounded:
        return False
    policy = open_retention(retention_config(live.policy, live.tokens))
    return Signal.MASS in policy.signals


async def bytes_aside(engine: EmbeddedEngine, live: LiveBudget) -> int:
    """RAM beside the live rows of a chat with this budget, the most of those in the context."""

    def look() -> int:
        sets = [seq.live_set for seq in engine.pool if isinstance(seq.live_set, BoundedSet)]
        own = (each.n_bytes_offloaded for each in sets if each.budget == live)
        return max(own, default=0)

    found: int = await asyncio.wrap_future(engine.scheduler.call(look))
    return found


async def last_attention(
    service: Service[EmbeddedEngine], ids: Ids, n_queries: int
) -> tuple[Rows, Rows]:
    """(keys float32[layers, KV heads, n - n_queries, head size], queries float32[layers, heads,
    n_queries, head size]) of the text `ids`: its last queries, and the keys of the tokens before
    them. The engine must watch attention. Raises TowerdError."""
    engine, n_keys = service.engine, len(ids) - n_queries
    live = LiveBudget("icecache", len(ids) + 1)  # all tokens stay; the last queries are observed
    request = GenerateRequest(ids=np.ascontiguousarray(ids, np.int32), n_predict=0, live=live)
    generation = engine.generate(request)
    async for _ in generation:
        pass

    def look() -> tuple[Rows, Rows]:
        observer = engine.parts.observer
        assert observer is not None
        seq = next(seq for seq in engine.pool if seq.live_set.budget == live)
        queries = observer.scaled_queries(bounded(seq), n_keys)
        rows = engine.core.memory.full_rows(seq.id, 0, n_keys)
        return keys_of(rows, queries.shape[-1]), queries

    keys, queries = await asyncio.wrap_future(engine.scheduler.call(look))
    generation.release()
    return keys, queries


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
