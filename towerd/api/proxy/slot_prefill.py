"""Steers a request that cannot name a slot into its slot.

llama-server chooses the slot that holds the longest prefix of the prompt. So the prompt is
evaluated in the leased slot first, except for its last token: then no other slot holds a longer
prefix. Whether the request ran there is checked when it is over.
"""

from __future__ import annotations

import asyncio
from typing import Any

from towerd.api.http.reply import encode
from towerd.api.proxy.forward import body_of
from towerd.api.proxy.headers import to_upstream
from towerd.api.proxy.link import Link
from towerd.api.proxy.plan import ProxyPlan
from towerd.api.proxy.watch import Dialect, ReplyWatch
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.slots.slot_lease import SlotLease
from towerd.errors import TowerdError


class SlotPrefill:
    """Prefills the slot of one request."""

    def __init__(
        self, link: Link, engine: LlamaServerEngine, lease: SlotLease, plan: ProxyPlan
    ) -> None:
        self.cache_n: int | None = None
        """Tokens of the prompt that were in the slot before; None: llama-server did not say."""
        self.prompt_ms: float | None = None
        """The time to evaluate the rest."""
        self._link = link
        self._engine = engine
        self._lease = lease
        self._plan = plan
        self._task: int | None = None

    async def run(self) -> None:
        """Evaluate the prompt except for its last token in the slot. Raises Unavailable."""
        ids = self._plan.ids
        if ids is None or len(ids) < 2:
            return
        asked: dict[str, Any] = {
            "prompt": ids[:-1].tolist(),
            "n_predict": 0,
            "id_slot": self._lease.slot,
            "cache_prompt": self._plan.compose,
            "n_cache_reuse": 0,
        }
        headers = to_upstream({"Content-Type": "application/json"}, self._engine.upstream.auth())
        data = await asyncio.to_thread(encode, asked)
        reply = await self._link.request(self._engine, "POST", "/completion", headers, data)
        try:
            watch = ReplyWatch(Dialect.NATIVE)
            watch.see(await body_of(reply))
        finally:
            reply.close()
        self.cache_n = watch.cache_n
        if watch.cache_n == len(ids) - 2:  # all of it: one token is always evaluated
            self.cache_n = len(ids) - 1
        self.prompt_ms = watch.timings.prompt_ms if watch.timings is not None else None
        self._task = await self._last_task()

    async def was_misplaced(self) -> bool:
        """Whether the request, now over, ran in another slot, or cannot be found."""
        try:
            return self._task is not None and await self._last_task() == self._task
        except TowerdError:
            return True

    async def _last_task(self) -> int | None:
        """The id of the task that ran last in the slot."""
        for slot in await self._engine.upstream.slots():
            if slot.get("id") == self._lease.slot:
                task = slot.get("id_task")
                return task if isinstance(task, int) else None
        return None
