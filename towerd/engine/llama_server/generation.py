"""A request of our own on a llama-server: /completion with token ids, as engine events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np

from towerd.engine.base import Event, Finish, GenerateRequest, Reuse, Started, StopType, Timings
from towerd.engine.llama_server.completion import (
    chunks,
    completion_body,
    piece_of,
    progress_of,
    timings_of,
)
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slots.slot_lease import SlotLease
from towerd.errors import TowerdError
from towerd.tokens import Ids

_STOPS: dict[str, StopType] = {"eos": "eos", "word": "word", "limit": "limit"}
_NO_TIME = Timings(0, 0, 0.0, 0, 0.0)


class Host(Protocol):
    """The engine as its generations see it."""

    @property
    def upstream(self) -> UpstreamClient: ...

    async def lease(
        self, ids: Ids, scope: str, session: str | None, *, compose: bool = True
    ) -> SlotLease:
        """A slot with as much of `ids` in it as the store has. Raises Unavailable."""
        ...

    def notice(self, error: TowerdError) -> None:
        """A request to llama-server failed."""
        ...


class LlamaServerGeneration:
    """Events of one running request. See `towerd.engine.base.Generation`."""

    def __init__(self, engine: Host, request: GenerateRequest) -> None:
        self._engine = engine
        self._request = request
        self._events: asyncio.Queue[Event | TowerdError] = asyncio.Queue()
        self._lease: SlotLease | None = None
        self._ids: list[int] = []
        self._is_started = False
        self._ended = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self._ended:
            event = await self._events.get()
            if isinstance(event, TowerdError):
                self._ended = True
                raise event
            self._ended = isinstance(event, Finish)
            yield event

    async def cancel(self) -> Finish | None:
        if self._ended:
            return None
        self.stop()
        try:
            async for event in self:
                if isinstance(event, Finish):
                    return event
        except TowerdError:
            pass
        return None

    def stop(self) -> None:
        """End it now, with a Finish of what was generated."""
        self.task.cancel()

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()

    async def _run(self) -> None:
        try:
            self._events.put_nowait(await self._generate())
        except asyncio.CancelledError:
            self._events.put_nowait(self._finish("cancelled", "", _NO_TIME))
        except TowerdError as error:
            self._engine.notice(error)
            self._events.put_nowait(error)
            self.release()

    async def _generate(self) -> Finish:
        request = self._request
        lease = self._lease = await self._engine.lease(
            request.ids, request.scope, request.session, compose=request.cache_prompt
        )
        body = completion_body(request, lease.slot)
        async with self._engine.upstream.stream("/completion", body) as reply:
            async for chunk in chunks(reply):
                await lease.launched()
                progress = progress_of(chunk)
                if progress is not None:
                    self._events.put_nowait(progress)
                    continue
                self._start()
                if chunk["stop"]:
                    timings = timings_of(chunk)
                    lease.observe(timings.cache_n, timings.prompt_ms)
                    return self._last(chunk["stop_type"], chunk.get("stopping_word", ""), timings)
                piece = piece_of(chunk)
                self._ids += piece.ids
                self._events.put_nowait(piece)
        raise TowerdError("llama-server ended its reply early.")

    def _start(self) -> None:
        """Emit Started once, when the prompt is evaluated."""
        if not self._is_started:
            assert self._lease is not None
            self._is_started = True
            self._lease.answering()
            self._events.put_nowait(Started(self._lease.reuse, len(self._request.ids)))

    def _last(self, stop_type: str, word: str, timings: Timings) -> Finish:
        stop = _STOPS.get(stop_type, "limit")
        return self._finish(stop, word, timings)

    def _finish(self, stop: StopType, word: str, timings: Timings) -> Finish:
        """The Finish, after updating the record of what the slot holds."""
        n_prompt = len(self._request.ids)
        lease, reply = self._lease, np.array(self._ids, np.int32)
        n_cached = 0
        if lease is not None and (self._is_started or stop != "cancelled"):
            # llama-server never evaluates the last token that it samples.
            n_cached = n_prompt + max(0, len(reply) - 1)
            lease.hold(reply, is_certain=True, hidden=stop in ("word", "cancelled"))
        return Finish(
            stop=stop,
            stopping_word=word,
            ids=tuple(self._ids),
            n_cached=n_cached,
            timings=timings,
            reuse=lease.reuse if lease is not None else Reuse(prefill=n_prompt),
        )
