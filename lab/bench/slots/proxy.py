"""A baseline: a proxy that has llama-server save and restore whole slots at every turn.

Before a request, the saved file that shares the longest prefix with it is restored into the least
recently used slot, unless a slot already holds as much of it. After the reply the whole slot is
saved: over the file that the chat continues, or into a new one. The client has its reply by then,
and waits for the save only if its next request arrives while the save is running.

This is the best that such a proxy can do: it compares token ids one by one, forwards requests
without overhead, and llama-server keeps no second copy of prompts in RAM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np

from towerd.cli.bench.harness.client import Ask, Completion, complete, new_session
from towerd.cli.bench.harness.servers import ServerProcess, llama_server
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.tokens import Ids, common_prefix

_FLAGS = ("--swa-full", "--cache-ram", "0", "--no-cache-idle-slots")
"""Layers with a sliding window can only be restored with all their rows."""


@dataclass(slots=True, eq=False)
class _Slot:
    id: int
    tokens: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    last_used_s: float = 0.0


class SlotProxy:
    """The proxy for one client. Saved slots survive a restart of llama-server."""

    def __init__(self, slot_dir: Path) -> None:
        """slot_dir: an empty directory."""
        self.bytes_written = 0
        """The sum of the file sizes of all saves."""
        self.save_s: list[float] = []
        self.restore_s: list[float] = []
        """From the request to llama-server to its answer."""
        self.restores_missed = 0
        """Restores of which llama-server used less than the shared prefix."""
        self._slot_dir = slot_dir
        self._files: dict[str, Ids] = {}
        """File name -> the tokens of the saved slot."""
        self._slots: list[_Slot] = []
        self._n_cells = 0
        """Cells of the context, shared by all slots."""
        self._saving: asyncio.Task[None] | None = None

    def server(self, model: Path, *flags: str) -> ServerProcess:
        """The llama-server behind the proxy."""
        return llama_server(model, *flags, *_FLAGS, "--slot-save-path", str(self._slot_dir))

    @asynccontextmanager
    async def connect(self, url: str) -> AsyncIterator[Ask]:
        """Query through the proxy; waits for the last save at the end."""
        async with aclosing(UpstreamClient(url)) as upstream, new_session() as session:
            props = await upstream.get("/props")
            self._slots = [_Slot(i) for i in range(props["total_slots"])]
            self._n_cells = props["default_generation_settings"]["n_ctx"]
            try:
                yield partial(self._complete, upstream, session)
            finally:
                await self._saved()

    async def _complete(
        self,
        upstream: UpstreamClient,
        session: aiohttp.ClientSession,
        prompt: Sequence[int],
        n_predict: int,
    ) -> Completion:
        """See `client.complete`. The times in the result begin with the client's request."""
        began = time.perf_counter()
        await self._saved()
        ids = np.asarray(prompt, np.int32)
        name, n_saved = self._file_for(ids)
        slot = self._slot_for(ids, n_saved)
        restores = n_saved > common_prefix(slot.tokens, ids)
        n_saved_all = len(self._files[name]) if restores else 0
        await self._make_room(upstream, slot, max(n_saved_all, len(ids) + n_predict))
        if restores:
            await self._restore(upstream, slot, name)
        before_s = time.perf_counter() - began
        done = await complete(session, upstream.url, prompt, n_predict, id_slot=slot.id)
        done.ttft_s += before_s
        done.last_token_s += before_s
        done.total_s += before_s
        if restores:
            self.restores_missed += done.timings["cache_n"] < self._n_usable(name, ids)
        slot.tokens = np.concatenate([ids, np.asarray(done.tokens, np.int32)])
        slot.last_used_s = time.monotonic()
        if not name or n_saved < len(self._files[name]):  # it is another chat's
            name = f"chat-{len(self._files)}.bin"
        self._saving = asyncio.create_task(self._save(upstream, slot, name))
        return done

    def _file_for(self, ids: Ids) -> tuple[str, int]:
        """The file that shares the longest prefix with `ids`, and how long that is."""
        shared = {name: common_prefix(tokens, ids) for name, tokens in self._files.items()}
        name = max(shared, key=shared.__getitem__, default="")
        return name, shared.get(name, 0)

    def _slot_for(self, ids: Ids, n_saved: int) -> _Slot:
        """The slot that holds the most of `ids`, if that is at least `n_saved`; else the least
        recently used one."""
        slot = max(self._slots, key=lambda slot: common_prefix(slot.tokens, ids))
        if 0 < common_prefix(slot.tokens, ids) >= n_saved:
            return slot
        return min(self._slots, key=lambda slot: slot.last_used_s)

    async def _make_room(self, upstream: UpstreamClient, slot: _Slot, n: int) -> None:
        """Erase other slots, least recently used first, until `slot` can hold `n` tokens: a restore
        without free cells fails. Their contents are saved."""
        others = sorted(self._slots, key=lambda other: other.last_used_s)
        others = [other for other in others if other is not slot and len(other.tokens)]
        n_held = sum(len(other.tokens) for other in others)
        for other in others:
            if n_held + n <= self._n_cells:
                return
            await upstream.erase(other.id)
            n_held -= len(other.tokens)
            other.tokens = other.tokens[:0]

    def _n_usable(self, name: str, ids: Ids) -> int:
        """How much of a restored file a prompt can use: the last token of a reply was never
        evaluated, and that of a prompt always is."""
        saved = self._files[name]
        return min(common_prefix(saved, ids), len(saved) - 1, len(ids) - 1)

    async def _restore(self, upstream: UpstreamClient, slot: _Slot, name: str) -> None:
        asked = time.perf_counter()
        await upstream.restore(slot.id, name)
        self.restore_s.append(time.perf_counter() - asked)

    async def _save(self, upstream: UpstreamClient, slot: _Slot, name: str) -> None:
        asked = time.perf_counter()
        await upstream.save(slot.id, name)
        self.save_s.append(time.perf_counter() - asked)
        self.bytes_written += (self._slot_dir / name).stat().st_size
        self._files[name] = slot.tokens

    async def _saved(self) -> None:
        """Wait for the running save: llama-server answers no request before it is done."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving
