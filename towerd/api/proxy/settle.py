"""Getting a request into its slot that has no way to name one.

llama-server puts it where the longest part of its prompt is already. So the prompt is evaluated in
the chosen slot first, but for its last token: no other slot is then as close to it. Whether it
went there is looked up when it is over.
"""

from __future__ import annotations

import asyncio
from typing import Any

from towerd.api.http.reply import encode
from towerd.api.proxy.forward import body_of
from towerd.api.proxy.headers import to_upstream
from towerd.api.proxy.link import Lease, Link, Sidecar
from towerd.api.proxy.plan import Plan
from towerd.api.proxy.watch import Dialect, Watch
from towerd.errors import TowerdError


class Settling:
    """One request's way into its slot."""

    def __init__(self, link: Link, engine: Sidecar, lease: Lease, plan: Plan) -> None:
        self.cache_n: int | None = None
        """How much of the prompt was there before; None: llama-server did not say."""
        self.prompt_ms: float | None = None
        """What evaluating the rest took."""
        self._link = link
        self._engine = engine
        self._lease = lease
        self._plan = plan
        self._task: int | None = None

    async def settle(self) -> None:
        """Evaluate the prompt but for its last token in the slot. Raises Unavailable."""
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
            watch = Watch(Dialect.NATIVE)
            watch.see(await body_of(reply))
        finally:
            reply.close()
        self.cache_n = watch.cache_n
        if watch.cache_n == len(ids) - 2:  # all of it: one token is always evaluated
            self.cache_n = len(ids) - 1
        self.prompt_ms = watch.timings.prompt_ms if watch.timings is not None else None
        self._task = await self._last_task()

    async def has_strayed(self) -> bool:
        """Whether the request, now over, ran in another slot, or cannot be found any more."""
        try:
            return self._task is not None and await self._last_task() == self._task
        except TowerdError:
            return True

    async def _last_task(self) -> int | None:
        """What ran last in the slot."""
        for slot in await self._engine.upstream.slots():
            if slot.get("id") == self._lease.slot:
                task = slot.get("id_task")
                return task if isinstance(task, int) else None
        return None
