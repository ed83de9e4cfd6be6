"""A completion request, parsed: what to run and how to answer it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.fields import INT32_MAX, Body
from towerd.api.http.hints import Hints
from towerd.api.http.reply import encode
from towerd.api.http.tenants import Tenant
from towerd.api.llama.reuse import towerd_json
from towerd.engine.base import (
    Engine,
    Event,
    Finish,
    GenerateRequest,
    LiveBudget,
    Piece,
    Progress,
    Reuse,
    Started,
)
from towerd.errors import ContextExceeded, InvalidRequest, NotSupported, TowerdError
from towerd.settings.config import RETENTION_SCOPES, RETENTIONS, UNBOUNDED, Config
from towerd.tokens import Ids

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.api.responses.pending_response import PendingResponse
    from towerd.store import Store
    from towerd.store.sessions.deletions import DeletionWatch
    from towerd.wire import Endpoint, Medium, Model, Reply, Request, WireThreads, Writer

log = logging.getLogger(__name__)

WRITE_S_MAX = 1e-3
"""Once an event took longer than this to write, later ones are written off the event loop."""
FIRST_TOKENS = 1024
"""Replies without a limit are rarely longer: RAM for longer ones is claimed when they are."""
ARRIVED_BYTES_MIN = 64 * 1024
"""Less is not told."""
FitCheck = Callable[[dict[str, bytes], list[int]], None]
"""See `towerd.wire.Request`."""
_LIVE_FIELDS = ("retention", "live_budget", "retention_scope")


class TaskChoice:
    """One reply of a task, and how far it is."""

    def __init__(
        self,
        threads: WireThreads,
        request: Request,
        writer: Writer,
        index: int,
    ) -> None:
        self.reply: Reply | None = None
        """None before it is its turn, and once it was written."""
        self.started: Started | None = None
        self.finish: Finish | None = None
        self.ttft_s: float | None = None
        """From a parsed request to its first token; None before it."""
        self.n_tokens = 0
        """Tokens of the reply so far."""
        self.turn: asyncio.Future[Finish | None] | None = None
        """See `Sessions.run`; None before it runs, and of all but responses that are kept."""
        self.ending: asyncio.Task[bytes] | None = None
        """Writes the end of a response and keeps it; None before, and of other endpoints."""
        self._threads = threads
        self._request = request
        self._writer = writer
        self._index = index
        self._began_s = time.monotonic()
        self._is_whole: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the writer has all of the reply; not done while more may come."""

    @property
    def reuse(self) -> Reuse:
        """Where the prompt came from; empty before the prompt is evaluated."""
        found = self.finish or self.started
        return Reuse() if found is None else found.reuse

    def absorb(self, event: Event) -> None:
        """Take notice of one of its events."""
        if isinstance(event, Started):
            self.started = event
            self.ttft_s = time.monotonic() - self._began_s
        elif isinstance(event, Finish):
            self.finish = event
        elif isinstance(event, Piece):
            self.n_tokens += 1

    def end(self, *, is_whole: bool) -> None:
        """No more of the reply will come; only the first call counts. is_whole: the writer has all of it."""
        if not self._is_whole.done():
            self._is_whole.set_result(is_whole)

    async def next_prompt(self) -> Ids | None:
        """See `GenerateRequest.next_prompt`."""
        is_whole = await asyncio.shield(self._is_whole)
        return await self._threads.call(0, self._next_prompt) if is_whole else None

    def _next_prompt(self) -> Ids:
        return self._request.next_prompt(self._writer.message(self._index))


class Task:
    """One HTTP completion request: one GenerateRequest for each choice, and how to answer it."""

    def __init__(
        self,
        engine: Engine,
        template: GenerateRequest,
        prompts: list[Ids],
        first: Reply,
        writer: Writer,
        *,
        sees_slots: bool,
        pending: PendingResponse | None = None,
    ) -> None:
        """template: the common part of its requests. first: the reply of the first choice. sees_slots:
        whether its reply names the slot (`id_slot`): which one it is says how much others ask. pending:
        of a request to /v1/responses."""
        wire = self.wire = first.request
        self.writer = writer
        self.scope = template.scope
        self.choices = [TaskChoice(engine.wire, wire, writer, i) for i in range(wire.n_choices)]
        self.choices[0].reply = first
        self.began: tuple[Store, DeletionWatch] | None = None
        """The store when it began, and what was deleted there since; None: it has not begun. A conversation that
        is continued begins before its tokens are read."""
        self.error: TowerdError | None = None
        """Why it failed while it was streamed."""
        self._engine = engine
        self._threads = engine.wire
        self._template = template
        self._prompts = prompts
        self._sees_slots = sees_slots
        self._pending = pending
        self._n_claimed = self._n_longest = self._n_arrived = self._bytes_of_token = 0
        self._is_slow = False
        self._wrote_s = 0.0
        """CPU time of writes since the event loop last had its turn, at most."""

    @property
    def ping_s(self) -> float | None:
        """Seconds of silence before an SSE comment; None: never."""
        return float(self.wire.ping_s) if self.wire.ping_s > 0 else None

    def bytes_to_claim(self) -> tuple[int, int]:
        """RAM for what the replies have beside their text: at first for as long ones as were asked for, or for
        FIRST_TOKENS, and for the copies of pictures and sounds that the store gets; later for replies twice as long each
        time. Bytes that are to be claimed beside those before, and bytes that all of it takes while it is written."""
        n, most = self._n_claimed, self._n_longest_max
        first = most if self.wire.n_predict >= 0 else FIRST_TOKENS
        self._n_claimed = min(2 * n or first, most)
        before = self.wire.reply_bytes(n)[0] if n else 0
        kept, written, self._bytes_of_token = self.wire.reply_bytes(self._n_claimed)
        return kept - before + (0 if n else self._media_bytes), written

    @property
    def _media_bytes(self) -> int:
        """Bytes of the files of its media that are kept, once for each choice: a turn is recorded with a copy of them."""
        if not self._template.keeps_media:
            return 0
        media = (self.wire.media(prompt) for prompt in range(len(self._prompts)))
        sizes = ({each.file_id: each.file_bytes for each in of_prompt} for of_prompt in media)
        return self.wire.n_per_prompt * sum(sum(each.values()) for each in sizes)

    @property
    def _n_longest_max(self) -> int:
        """The most tokens that a reply may have."""
        asked = self.wire.n_predict
        return max(1, min(asked, self._engine.n_ctx) if asked >= 0 else self._engine.n_ctx)

    def bytes_arrived(self) -> int:
        """RAM of what was to be claimed that replies have taken since this was last asked: they have it now."""
        n_bytes = self._bytes_of_token * self._n_arrived
        if n_bytes < ARRIVED_BYTES_MIN:
            return 0
        self._n_arrived = 0
        return n_bytes

    @property
    def outgrows_claim(self) -> bool:
        """Whether a reply is as long as what was claimed for it."""
        return self._n_longest >= self._n_claimed < self._n_longest_max

    @property
    def first_prompt(self) -> Ids:
        """The prompt of the first choice."""
        return self._prompts[0]

    def prompt_of(self, index: int) -> Ids:
        """The prompt of a choice."""
        return self._prompts[index // self.wire.n_per_prompt]

    def absorb(self, index: int, event: Event) -> None:
        """Take notice of an event of a choice."""
        choice = self.choices[index]
        n_before = choice.n_tokens
        choice.absorb(event)
        self._n_arrived += choice.n_tokens - n_before
        self._n_longest = max(self._n_longest, choice.n_tokens)

    def slot_of(self, finish: Finish) -> int:
        """The slot of its reply, as its client knows it: the one that it named, if there is such a one."""
        asked = _decoded(self.wire.field("id_slot"))
        if type(asked) is int and 0 <= asked < self._engine.n_slots:
            return asked
        return finish.slot if self._sees_slots else 0

    @property
    def session(self) -> str | None:
        """The session that its client names."""
        return self._template.session

    async def request_of(self, index: int) -> GenerateRequest:
        """The request of a choice whose turn it is. Not made earlier: samplers take memory."""
        choice = self.choices[index]
        if choice.reply is None:
            choice.reply = await self._threads.call(0, _new_reply, self.wire, index)
        prompt = index // self.wire.n_per_prompt
        return replace(
            self._template,
            ids=self._prompts[prompt],
            media=self.wire.media(prompt),
            reply=choice.reply,
            next_prompt=choice.next_prompt,
        )

    def new_turn(self, index: int) -> asyncio.Future[Finish | None] | None:
        """What is to get the turn of a choice that runs from now on; None: it does not matter here."""
        if self._pending is not None and self._pending.is_to_be_kept:
            self.choices[index].turn = asyncio.get_running_loop().create_future()
        return self.choices[index].turn

    async def events(self, index: int, event: Event) -> bytes:
        """The bytes of an event of a choice in a stream. Raises TowerdError."""
        if isinstance(event, Piece) and event.chunk is not None:
            return await self._timed(self.writer.partial, event.chunk)
        if isinstance(event, Progress):
            done = (event.total, event.cache, event.processed, int(event.time_ms))
            return self.writer.progress(index, *done)
        if isinstance(event, Finish):
            return await self.final(index, event)
        return b""

    async def final(self, index: int, finish: Finish) -> bytes:
        """The last events of a choice; if not streaming, the whole reply with the last choice. A response is
        kept before.

        Raises TowerdError."""
        choice = self.choices[index]
        if self._pending is None:
            data = await self._end(index, finish)
        else:
            choice.ending = asyncio.create_task(self._end(index, finish))
            # Shielded: what has begun to be kept is kept, also if the client leaves.
            data = await asyncio.shield(choice.ending)
        choice.end(is_whole=True)
        return data

    @property
    def known_names(self) -> list[str]:
        """What its client may continue before it has the whole reply: the ids of the responses that it streams and
        keeps, and that of their conversation."""
        if self._pending is None or not self._pending.is_to_be_kept:
            return []
        names = [self._pending.conversation] if self._pending.conversation else []
        if self.wire.stream:
            names += [self.writer.response_id(index) for index in range(len(self.choices))]
        return names

    @property
    def has_more_to_keep(self) -> bool:
        """Whether it was closed before all responses were kept that `keep_rest` keeps."""
        return any(map(self._is_to_be_kept, self.choices))

    def _is_to_be_kept(self, choice: TaskChoice) -> bool:
        if choice.ending is not None:
            return not choice.ending.done()
        return self.wire.stream and choice.turn is not None

    async def keep_rest(self) -> None:
        """Keep its responses as far as they came before it was closed. The client of a stream knows a response's id,
        and may continue it; one that waited for a whole reply knows nothing of it, and asks again."""
        for index in range(len(self.choices)):
            try:
                await self._keep(index)
            except TowerdError as error:
                log.error("a response was not kept", extra={"error": str(error)})
            except Exception:
                log.exception("a response was not kept")

    async def _keep(self, index: int) -> None:
        choice = self.choices[index]
        if not self._is_to_be_kept(choice):
            return
        if choice.ending is not None:
            await choice.ending
        elif choice.turn is not None:
            finish = await choice.turn
            if finish is not None and finish.ids:
                await self._end(index, finish)

    async def _end(self, index: int, finish: Finish) -> bytes:
        """See `final`."""
        extra = b""
        if self.wire.stream:
            extra = encode({"towerd": towerd_json(finish)})
        elif finish.truncated:  # OpenAI's shapes have no field for it
            extra = encode({"towerd": {"truncated": True}})
        choice = self.choices[index]
        reply, choice.reply = choice.reply, None
        assert reply is not None
        slot, pending = finish.slot if self._sees_slots else 0, self._pending
        shown: dict[str, Any] = {}
        if pending is not None and not finish.ids:
            pending = await pending.without_tokens(self.session, self.scope)
            shown["store"] = pending.is_kept
        if self.error is not None:
            error = {"code": "server_error", "message": self.error.public}
            shown |= {"status": "failed", "error": error}
        elif finish.stop == "cancelled":
            shown["status"] = "incomplete"
        ended = reply, slot, finish.n_cached, extra, encode(shown) if shown else b""
        data = await self._threads.call(0, self.writer.final, *ended)
        if pending is not None:
            since = None if self.began is None else self.began[1]
            await pending.answered(self.writer.response(index), finish, self.scope, since)
        return data

    async def end_reasoning(self) -> bool:
        """End the reasoning of its choices with the next tokens; False: none is reasoning."""
        replies = [choice.reply for choice in self.choices if choice.reply is not None]
        return await self._engine.end_reasoning(replies)

    def close(self) -> None:
        """The task was answered or abandoned."""
        for choice in self.choices:
            choice.end(is_whole=False)

    async def _timed(self, write: Callable[..., bytes], *args: Any) -> bytes:
        if self._is_slow:
            return await self._threads.call(0, write, *args)
        began = time.thread_time()  # not that of a busy machine: a thread costs more than it saves
        data = write(*args)
        took_s = time.thread_time() - began
        self._is_slow = took_s > WRITE_S_MAX
        self._wrote_s += took_s
        if self._wrote_s > WRITE_S_MAX:  # events that had queued up are written one after the other
            self._wrote_s = 0.0
            await asyncio.sleep(0)
        return data


async def parse_task(
    endpoint: Endpoint,
    body: bytes,
    tenant: Tenant,
    hints: Hints,
    engine: Engine,
    config: Config,
    upload: tuple[bytes, int, int] | None = None,
    pending: PendingResponse | None = None,
    continued: tuple[Ids, int] | None = None,
    own_scope: str = "",
    kept_media: Callable[[Ids], Medium | None] | None = None,
) -> Task:
    """Check and tokenize a request body. upload, continued: see `towerd.wire.Request`. pending: what the body is of.
    own_scope: under which a body runs that names no LoRA adapters; empty: under those of all requests. kept_media: see
    `GenerateRequest`. Raises WireError, InvalidRequest, ContextExceeded."""

    def check_fit(kept: dict[str, bytes], least: list[int]) -> None:
        limit = _limit(_live(kept.get, config, engine), config, engine)
        limit.check(least, are_least=True)

    model = engine.wire.model
    n_bytes = len(body) + (upload[2] - upload[1] if upload else 0)
    shown = b"" if pending is None else pending.shown
    parsed = await engine.wire.call(
        n_bytes, _parse, model, endpoint, body, check_fit, upload, continued, shown
    )
    prompts, first, writer = parsed
    wire = first.request
    if pending is not None and pending.context.conversation is not None and wire.n_choices > 1:
        raise InvalidRequest("Only one response at a time is made in a conversation", param="n")
    live = _live(wire.field, config, engine)
    lora = _decoded(wire.field("lora"))
    scope = own_scope if own_scope and lora is None else engine.adapters.scope(tenant.scope, lora)
    _limit(live, config, engine).check([len(ids) for ids in prompts])
    template = GenerateRequest(
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
        reuse_tokens_min=_reuse_tokens_min(wire.field("n_cache_reuse")),
        kept_media=kept_media,
        keeps_media=_keeps_media(endpoint, wire.field("store"), config),
    )
    return Task(
        engine, template, prompts, first, writer, sees_slots=tenant.sees_all, pending=pending
    )  # fmt: skip


def _parse(
    model: Model,
    endpoint: Endpoint,
    body: bytes,
    check_fit: FitCheck,
    upload: tuple[bytes, int, int] | None,
    continued: tuple[Ids, int] | None,
    shown: bytes,
) -> tuple[list[Ids], Reply, Writer]:
    from towerd.wire import Reply, Request, Writer

    request = Request(model, endpoint, body or b"{}", check_fit, upload, continued)
    prompts = request.prompts
    if not prompts or not all(len(ids) for ids in prompts):
        raise InvalidRequest('"prompt" must not be empty')
    return prompts, Reply(request, 0), Writer(request, shown)


def _new_reply(request: Request, index: int) -> Reply:
    from towerd.wire import Reply

    return Reply(request, index)


def _decoded(value: bytes | None) -> Any:
    return None if value is None else msgspec.json.decode(value)


def _keeps_media(endpoint: Endpoint, store: bytes | None, config: Config) -> bool:
    """Whether the store keeps the files of a request's media: not the sound of a transcription, whose text is what
    matters, nor where the body has `"store": false`."""
    return config.keep_media and endpoint != "transcription" and _decoded(store) is not False


def _agent(text: bytes) -> str | None:
    """A name for the agent with this system prompt and these tools; None: it has neither."""
    return "~" + hashlib.blake2b(text, digest_size=8).hexdigest() if text else None


# ---- how long a prompt may be, and which of its tokens stay live ---------------------------------


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The limit on the prompts of one request, in tokens."""

    n_ctx: int
    outgrown_max: int = 0
    """Total tokens of the prompts that exceed the context; 0: none may exceed it."""

    def check(self, lengths: list[int], *, are_least: bool = False) -> None:
        """Raises ContextExceeded unless prompts of these lengths may be evaluated. are_least: they
        may be longer, since they were not tokenized."""
        outgrown = [n for n in lengths if n >= self.n_ctx]
        if not outgrown or sum(outgrown) <= self.outgrown_max:
            return
        if not self.outgrown_max:
            raise ContextExceeded.of_request(outgrown[0], self.n_ctx, is_least=are_least)
        least = "at least " if are_least else ""
        raise ContextExceeded(
            f"request ({least}{sum(outgrown)} tokens) exceeds the limit of prompts longer than the context "
            f"({self.outgrown_max} tokens), see --prompt-tokens-max",
            n_prompt_tokens=sum(outgrown),
            n_ctx=self.n_ctx,
        )


def _limit(live: LiveBudget, config: Config, engine: Engine) -> PromptLimit:
    may_outgrow = live.policy in engine.outgrowing
    return PromptLimit(engine.n_ctx, config.prompt_tokens_max if may_outgrow else 0)


def _reuse_tokens_min(data: bytes | None) -> int | None:
    """The field `n_cache_reuse`; None if the body has none. Less than 0 is 0, as in llama-server. Raises
    InvalidRequest."""
    body: Body = {"n_cache_reuse": _decoded(data)}
    if fields.present(body, "n_cache_reuse") is None:
        return None
    return max(0, fields.integer_in(body, ("n_cache_reuse",), 0, -1 - INT32_MAX, INT32_MAX))


def _live(field: Callable[[str], bytes | None], config: Config, engine: Engine) -> LiveBudget:
    """The budget that a body's fields ask for, else that of the daemon's settings.

    Raises InvalidRequest for an unknown policy, or a budget for a policy that has none, and NotSupported
    in front of a llama-server."""
    body: Body = {name: _decoded(field(name)) for name in _LIVE_FIELDS}
    name = fields.present(body, *_LIVE_FIELDS)
    if name is not None and config.engine != "embedded":
        raise NotSupported(
            f"Field '{name}' needs the embedded engine: a llama-server keeps all of a chat, or "
            "shifts its context if it was started with --context-shift"
        )
    policy = fields.string(body, "retention", config.retention)
    if policy not in RETENTIONS:
        raise InvalidRequest(
            f"Field 'retention': there is no {policy[:40]!r}, take one of {', '.join(RETENTIONS)}"
        )
    scope = fields.string(body, "retention_scope", config.retention_scope)
    if scope not in RETENTION_SCOPES:
        raise InvalidRequest(
            f"Field 'retention_scope': there is no {scope[:40]!r}, take one of "
            f"{', '.join(RETENTION_SCOPES)}"
        )
    tokens = fields.integer_in(body, ("live_budget",), 0, 1, INT32_MAX)
    if policy in UNBOUNDED:
        if tokens:
            bounded = ", ".join(name for name in RETENTIONS if name not in UNBOUNDED)
            raise InvalidRequest(
                f"Field 'live_budget' needs a policy that keeps to it: set 'retention' to one of "
                f"{bounded}"
            )
        return LiveBudget(policy)
    return LiveBudget(policy, tokens or config.live_budget or engine.n_ctx // 2, scope)


RUNNING: web.AppKey[dict[str, Task]] = web.AppKey("running")
"""The running completions, by id."""
