"""A completion request, parsed: what to run and how to answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from towerd.api.http.hints import Hints
from towerd.api.http.reply import encode
from towerd.api.http.scope import scope_of
from towerd.api.llama.live import parse_live
from towerd.api.llama.prompts import PromptLimit
from towerd.api.llama.reuse import towerd_json
from towerd.engine.base import Engine, Event, Finish, GenerateRequest, LiveBudget, Piece, Progress
from towerd.errors import InvalidRequest
from towerd.settings.config import Config
from towerd.tokens import Ids

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.wire import Endpoint, Reply, Request, WireThreads, Writer

WRITE_S_MAX = 1e-3
"""Once an event took longer than this to write, later ones are written off the event loop."""
_NO_HINTS = Hints()
FitCheck = Callable[[dict[str, bytes], list[int]], None]
"""See `towerd.wire.Request`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request's headers and key determine, as opposed to its body."""

    scope: str
    hints: Hints = _NO_HINTS
    sees_slots: bool = True
    """Whether replies name their slot (`id_slot`): which one it is says how much others ask."""


class ChoiceChat:
    """The chat of one choice."""

    def __init__(self, threads: WireThreads, request: Request, writer: Writer, choice: int) -> None:
        self._threads = threads
        self._request = request
        self._writer = writer
        self._choice = choice
        self._is_over = asyncio.Event()
        self._is_whole = False

    def complete(self) -> None:
        """The writer has the whole reply."""
        self._is_whole = True
        self._is_over.set()

    def abandon(self) -> None:
        """No more of the reply will come. No effect after `complete`."""
        self._is_over.set()

    async def next_prompt(self) -> Ids | None:
        """See `GenerateRequest.next_prompt`."""
        await self._is_over.wait()
        return await self._threads.call(0, self._next_prompt) if self._is_whole else None

    def _next_prompt(self) -> Ids:
        return self._request.next_prompt(self._writer.message(self._choice))


class Task:
    """One HTTP completion request: one GenerateRequest for each choice, and how to answer it."""

    def __init__(
        self, engine: Engine, wire: Request, first: Reply, prompts: list[Ids], writer: Writer
    ) -> None:
        """first: the reply of the first choice."""
        self._engine = engine
        self._threads = engine.wire
        self.wire = wire
        self.writer = writer
        self.prompts = prompts
        self.n_choices = wire.n_choices
        self.template = GenerateRequest(ids=prompts[0])
        """The common part of all its requests."""
        self.sees_slots = True
        """See `Caller`."""
        self._replies: dict[int, Reply] = {0: first}
        self._chats: dict[int, ChoiceChat] = {}
        self._is_slow = False

    @property
    def ping_s(self) -> float | None:
        """Seconds of silence before an SSE comment; None: never."""
        return float(self.wire.ping_s) if self.wire.ping_s > 0 else None

    def request_of(self, choice: int) -> Callable[[], Awaitable[GenerateRequest]]:
        """A factory for the request of a choice, called when it is its turn: samplers take
        memory."""

        async def make() -> GenerateRequest:
            if choice not in self._replies:
                self._replies[choice] = await self._threads.call(0, _new_reply, self.wire, choice)
            chat = self._chats[choice] = ChoiceChat(self._threads, self.wire, self.writer, choice)
            return replace(
                self.template,
                ids=self.prompts[choice // self.wire.n_per_prompt],
                media=self.wire.media(choice // self.wire.n_per_prompt),
                reply=self._replies[choice],
                next_prompt=chat.next_prompt,
            )

        return make

    async def events(self, choice: int, event: Event) -> bytes:
        """The bytes of an event in a stream. Raises TowerdError."""
        if isinstance(event, Piece) and event.chunk is not None:
            return await self._timed(self.writer.partial, event.chunk)
        if isinstance(event, Progress):
            done = (event.total, event.cache, event.processed, int(event.time_ms))
            return self.writer.progress(choice, *done)
        if isinstance(event, Finish):
            return await self.final(choice, event)
        return b""

    async def final(self, choice: int, finish: Finish) -> bytes:
        """The last events of a choice; if not streaming, the whole reply with the last choice.

        Raises TowerdError."""
        extra = b""
        if self.wire.stream:
            extra = encode({"towerd": towerd_json(finish)})
        elif finish.truncated:  # OpenAI's shapes have no field for it
            extra = encode({"towerd": {"truncated": True}})
        reply = self._replies.pop(choice)
        slot = finish.slot if self.sees_slots else 0
        data = await self._threads.call(0, self.writer.final, reply, slot, finish.n_cached, extra)
        self._chats[choice].complete()
        return data

    async def end_reasoning(self) -> bool:
        """End the reasoning of its choices with the next tokens; False: none is reasoning."""
        return await self._engine.end_reasoning(list(self._replies.values()))

    def close(self) -> None:
        """The task was answered or abandoned."""
        for chat in self._chats.values():
            chat.abandon()

    async def _timed(self, write: Callable[..., bytes], *args: Any) -> bytes:
        if self._is_slow:
            return await self._threads.call(0, write, *args)
        began = time.thread_time()  # not that of a busy machine: a thread costs more than it saves
        data = write(*args)
        self._is_slow = time.thread_time() - began > WRITE_S_MAX
        return data


async def parse_task(
    endpoint: Endpoint, body: bytes, caller: Caller, engine: Engine, config: Config
) -> Task:
    """Check and tokenize a request body. Raises WireError, InvalidRequest, ContextExceeded."""
    threads = engine.wire

    def check_fit(kept: dict[str, bytes], least: list[int]) -> None:
        limit = _limit(_live(kept.get, config, engine), config, engine)
        limit.check(least, are_least=True)

    task = await threads.call(len(body), _parse, engine, endpoint, body, check_fit)
    wire, task.sees_slots = task.wire, caller.sees_slots
    live = _live(wire.field, config, engine)
    scope = scope_of(engine, caller.scope, _decoded(wire.field("lora")))
    task.template = _template(wire, task.prompts, scope, caller.hints, live)
    _limit(live, config, engine).check([len(ids) for ids in task.prompts])
    return task


def _live(field: Callable[[str], bytes | None], config: Config, engine: Engine) -> LiveBudget:
    """The budget that a body's fields ask for. Raises InvalidRequest."""
    fields = {name: _decoded(field(name)) for name in ("retention", "live_budget")}
    return parse_live(fields, config, engine.n_ctx)


def _limit(live: LiveBudget, config: Config, engine: Engine) -> PromptLimit:
    may_outgrow = live.policy in engine.outgrowing
    return PromptLimit(engine.n_ctx, config.prompt_tokens_max if may_outgrow else 0)


def _parse(engine: Engine, endpoint: Endpoint, body: bytes, check_fit: FitCheck) -> Task:
    from towerd.wire import Reply, Request, Writer

    request = Request(engine.wire.model, endpoint, body or b"{}", check_fit)
    prompts = request.prompts
    if not prompts or not all(len(ids) for ids in prompts):
        raise InvalidRequest('"prompt" must not be empty')
    return Task(engine, request, Reply(request, 0), prompts, Writer(request))


def _new_reply(request: Request, choice: int) -> Reply:
    from towerd.wire import Reply

    return Reply(request, choice)


def _decoded(value: bytes | None) -> Any:
    return None if value is None else msgspec.json.decode(value)


def _template(
    wire: Request, prompts: list[Ids], scope: str, hints: Hints, live: LiveBudget
) -> GenerateRequest:
    return GenerateRequest(
        ids=prompts[0],
        n_predict=wire.n_predict,
        scope=scope,
        session=hints.session,
        workflow=hints.workflow,
        agent=hints.agent or _agent(wire.agent),
        cache_prompt=wire.cache_prompt,
        return_progress=wire.return_progress and wire.stream,
        n_keep=wire.n_keep,
        live=live,
    )


def _agent(text: bytes) -> str | None:
    """A name for the agent with this system prompt and these tools; None: it has neither."""
    return "~" + hashlib.blake2b(text, digest_size=8).hexdigest() if text else None


RUNNING: web.AppKey[dict[str, Task]] = web.AppKey("running")
"""The running completions, by id."""
