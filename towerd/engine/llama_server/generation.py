"""A request on a llama-server: POST /completion with token ids, its stream as engine events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
from aiohttp import ClientResponse

from towerd.engine.base import (
    Finish,
    GenerateRequest,
    Generation,
    Piece,
    Progress,
    Reuse,
    Started,
    StopType,
    Timings,
    encode,
)
from towerd.engine.llama_server.availability import Availability
from towerd.engine.llama_server.process.client import LOST, read
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.slots.holds import SlotHold, SlotHolds
from towerd.errors import TowerdError, Unavailable
from towerd.wire import Received, Reply, Request, WireThreads

log = logging.getLogger(__name__)

PROGRESS_TOKENS_MIN = 256
"""Prompt tokens to evaluate from which llama-server is asked for its progress: an older one sends
nothing before the first token otherwise, and what waits for the launch would wait for that."""
READ_BYTES_MAX = 16 * 1024
"""Bytes of a stream that are worked through in one step of the event loop: about a hundred events."""
_NO_TIME = Timings(0, 0, 0.0, 0, 0.0)
_DATA = b"data: {"


class LlamaServerGeneration(Generation):
    """A request that a task sends to llama-server."""

    def __init__(
        self,
        holds: SlotHolds,
        availability: Availability,
        adapters: UpstreamAdapters,
        wire: WireThreads,
        request: GenerateRequest,
    ) -> None:
        super().__init__()
        self._holds = holds
        self._availability = availability
        self._adapters = adapters
        self._wire = wire
        self._request = request
        self._reply = request.reply
        self._hold: SlotHold | None = None
        self._ids: list[int] = []
        """The reply's tokens that are known, also those that a stop string cuts off."""
        self._is_started = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        self.task.cancel()

    def release(self) -> None:
        if self._hold is not None:
            self._hold.release()

    async def _run(self) -> None:
        try:
            self.events.put_nowait(await self._generate())
        except asyncio.CancelledError:
            self.events.put_nowait(self._finish("cancelled", _NO_TIME))
        except TowerdError as error:
            self._availability.notice(error)
            is_lost = self._hold is not None and isinstance(error, Unavailable)
            self._fail(self._availability.failure(LOST) if is_lost else error)
        except Exception:
            log.exception("a request on llama-server failed")
            self._fail(TowerdError("Internal error; see the daemon's log"))

    def _fail(self, error: TowerdError) -> None:
        """Emit the error; what was generated before is for `cancel`."""
        if self._ids:
            self.cut_off = self._finish("cancelled", _NO_TIME)
        else:
            self.release()
        self.events.put_nowait(error)

    async def _generate(self) -> Finish:
        request = self._request
        reply = self._reply = request.reply or await self._quiet_reply()
        hold = self._hold = await self._holds.hold(
            request.ids,
            request.scope,
            request.session,
            n_predict=request.n_predict,
            cache_prompt=request.cache_prompt,
            takes_moved=request.takes_moved,
            run_tokens_min=self._holds.runs.tokens_min(request),
        )
        reply.evaluated_before(*hold.evaluated)
        # Only this endpoint says how llama-server calls the reply.
        is_named = reply.request.has_reasoning_control
        path = "/v1/completions" if is_named else "/completion"
        own = encode(self._own_fields(hold, verbose=is_named))
        body = await self._wire.call(0, reply.request.upstream_body, reply.choice, own)
        async with self._holds.upstream.stream(path, body) as stream:
            hold.launched()
            async for data in events(stream):
                if self._take(hold, reply.received(data)):
                    return self._last(hold, reply)
        raise Unavailable(LOST)

    def _own_fields(self, hold: SlotHold, *, verbose: bool) -> dict[str, Any]:
        lora = self._adapters.entries(self._request.scope)
        fields: dict[str, Any] = {
            "id_slot": hold.slot,
            "stream": True,
            "return_tokens": True,
            "return_progress": self._request.return_progress
            or hold.reuse.prefill >= PROGRESS_TOKENS_MIN,
            "cache_prompt": self._request.cache_prompt,
            "n_cache_reuse": 0,  # it would not check what it moves, and the slot is stored later
        }
        fields |= {"lora": lora} if lora else {}
        return fields | ({"verbose": True} if verbose else {})

    async def _quiet_reply(self) -> Reply:
        """The reply of a request that no client made."""
        request, wire = self._request, self._wire
        body = {"prompt": request.ids, "n_predict": request.n_predict, **request.fields}

        def make() -> Reply:
            return Reply(Request(wire.model, "completion", encode(body)), 0)

        return await wire.call(len(request.ids), make)

    def _take(self, hold: SlotHold, received: Received) -> bool:
        """Emit what an event says; whether it was the last one."""
        if received.progress is not None:
            if self._request.return_progress:
                self.events.put_nowait(Progress(*received.progress))
            return False
        if received.chunk is not None or received.is_last:
            self._start(hold)
        self._ids += received.ids
        if received.chunk is not None:
            text = received.chunk.text.decode("utf-8", "replace")
            self.events.put_nowait(Piece(text, received.ids, received.chunk))
        return received.is_last

    def _start(self, hold: SlotHold) -> None:
        """Emit Started once, when the prompt is evaluated."""
        if not self._is_started:
            assert self._reply is not None
            self._is_started = True
            hold.answering()
            _, _, prompt_ms, _, _ = self._reply.timings
            self.events.put_nowait(Started(hold.reuse, len(self._request.ids), prompt_ms))

    def _last(self, hold: SlotHold, reply: Reply) -> Finish:
        timings = Timings(*reply.timings)
        hold.observe(reply.n_reused, timings.prompt_ms)
        return self._finish(reply.stop or "limit", timings)

    def _finish(self, stop: StopType, timings: Timings) -> Finish:
        """The Finish, after updating the record of what the slot holds."""
        n_prompt, hold, reply = len(self._request.ids), self._hold, self._reply
        kept, n_cached, word = self._ids, 0, ""
        is_exact, n_unnamed = True, 0
        if reply is not None:
            kept, is_exact = self._ids[: reply.n_kept], reply.is_exact
            n_unnamed = reply.n_unnamed
            word = reply.stopping_word.decode("utf-8", "replace")
        if hold is not None and (self._is_started or stop != "cancelled"):
            # llama-server never evaluates the last token that it samples.
            n_cached = n_prompt + min(len(kept), max(0, len(self._ids) - 1))
            certain = self._ids if is_exact else []
            n_uncertain = len(self._ids) - len(certain) + n_unnamed
            hold.replied(
                np.array(certain, np.int32), n_uncertain=n_uncertain, hidden=stop == "cancelled"
            )
        return Finish(
            stop=stop,
            stopping_word=word,
            ids=tuple(kept),
            n_cached=n_cached if is_exact else n_prompt,
            timings=timings,
            reuse=hold.reuse if hold is not None else Reuse(prefill=n_prompt),
            slot=-1 if hold is None else hold.slot,
        )


async def events(reply: ClientResponse) -> AsyncIterator[bytes]:
    """The JSON objects of a stream of server-sent events. Raises TowerdError: an error that has no
    event's shape."""
    rest = b""
    while data := await read(reply, READ_BYTES_MAX):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line[len(_DATA) - 1 :].rstrip(b"\r")
            elif line.startswith(b"error: {"):
                raise _error(line[len(b"error: ") :])
        if len(data) == READ_BYTES_MAX:
            await asyncio.sleep(0)


def _error(data: bytes) -> TowerdError:
    try:
        return TowerdError(str(msgspec.json.decode(data)["message"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        return TowerdError("llama-server failed")
