"""Every endpoint that generates: llama-server's own, OpenAI's, Anthropic's and infill.

`towerd.wire` reads the body and writes the reply; this module adds what towerd knows about reuse:
the reuse header, and the `towerd` object of a reply's last event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from towerd.api.http import fields
from towerd.api.http.body import BODIES, read_bytes, read_object, release_body
from towerd.api.http.form import boundary_of, read_form
from towerd.api.http.hints import SESSION_HEADER, hints_of
from towerd.api.http.kept_stream import KeptStream
from towerd.api.http.keys import CONFIG, LIMITS, METRICS, STREAMS, TENANT, service_of
from towerd.api.http.recent_requests import RECENT, RecentRequest, short_id
from towerd.api.http.reply import encode, error_event, json_reply
from towerd.api.http.request_log import log_finished, log_refused, title_for
from towerd.api.http.sse import PING, ClientStalled, QueuedStream
from towerd.api.http.translation import whole_reply
from towerd.api.llama.fanout import Events, fan_out
from towerd.api.llama.reuse import timings_of, total
from towerd.api.llama.slots import BOOK
from towerd.api.llama.streams import CONVERSATION, follow, key_of
from towerd.api.llama.task import RUNNING, Task, parse_task
from towerd.api.llama.why import find_divergence
from towerd.api.responses.pending_response import PendingResponse
from towerd.api.responses.streamed import STREAMED, StreamedResponse
from towerd.engine.base import Event, Finish, Started
from towerd.errors import InvalidRequest, NotSupported, TowerdError, unforeseen
from towerd.sessions.slot_saves import SlotChat
from towerd.store.tree.scope import tenant_of

if TYPE_CHECKING:
    from towerd.sessions.divergence import Divergence
    from towerd.wire import Endpoint

log = logging.getLogger(__name__)

REUSE_HEADER = "X-Towerd-Reuse"


def completing(endpoint: Endpoint) -> Handler:
    """The handler of an endpoint that generates."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await _complete(request, endpoint)

    return handle


post_completion = completing("completion")
post_infill = completing("infill")
post_openai_completion = completing("completions")
post_chat = completing("chat")
post_responses = completing("responses")
post_messages = completing("messages")


async def post_control(request: web.Request) -> web.Response:
    """End the reasoning of a reply while it is generated. Takes the `id` of a running completion, and
    `action`: reasoning_end."""
    body = await read_object(request)
    name, action = fields.string(body, "id", ""), fields.string(body, "action", "")
    if not name:
        raise InvalidRequest("missing completion id")
    if action != "reasoning_end":
        raise InvalidRequest("unknown control action")
    task = request.app[RUNNING].get(name)
    if task is None or tenant_of(task.scope) != request[TENANT].scope:
        refused = "no active completion for this id"
    elif not await task.end_reasoning():
        refused = "reasoning control not enabled for this completion"
    else:
        return json_reply({"success": True})
    return json_reply({"success": False, "message": refused})


async def post_transcription(request: web.Request) -> web.StreamResponse:
    """Write down a sound: a form with `file`, `prompt`, `language` and fields of completions."""
    if not service_of(request).engine.info.has_media:
        raise NotSupported("The current model does not support audio input.")
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("A transcription takes a form (multipart/form-data)")
    boundary = boundary_of(request.headers[hdrs.CONTENT_TYPE])
    return await _complete(request, "transcription", boundary)


async def _complete(
    request: web.Request, endpoint: Endpoint, boundary: bytes = b""
) -> web.StreamResponse:
    """boundary: of a body that is a form"""
    engine, config = service_of(request).engine, request.app[CONFIG]
    hints = hints_of(request)
    body, upload = await read_bytes(request), None
    if boundary:
        form = await asyncio.to_thread(read_form, body, boundary)
        upload = (body, *form.files["file"]) if "file" in form.files else None
        body = encode(form.fields)
    title = await title_for(request, body)
    pending = None
    if endpoint == "responses":
        pending, body = await PendingResponse.of(request, body)
    task = await parse_task(endpoint, body, request[TENANT], hints, engine, config, upload, pending)
    release_body(request)
    if pending is not None:
        pending.hold(request)
    del body, upload, pending
    return await answer(request, task, title)


async def answer(request: web.Request, task: Task, title: str) -> web.StreamResponse:
    """Run a task and answer the request that it is of, streamed or whole. title: for the log."""
    await request.app[BODIES].claim_reply(request, *task.bytes_to_claim())
    if not task.wire.stream:
        return await _whole(request, task, title)
    if name := request.headers.get(CONVERSATION):
        kept = KeptStream()
        request.app[STREAMS].start(key_of(request, name), kept, _stream(request, task, kept, title))
        return await follow(request, kept, 0)
    with QueuedStream(request) as stream:
        await _stream(request, task, stream, title)
        await stream.close()
    return stream.response


@asynccontextmanager
async def _running(request: web.Request, task: Task, title: str) -> AsyncIterator[Events]:
    """The events of a task. The request is remembered and logged when it has ended; an error reply is
    logged where it is made."""
    service, under_way = service_of(request), request.app[RUNNING]
    n_slots, events_max = service.engine.n_slots, request.app[LIMITS].events_max
    under_way[task.wire.id] = task
    if task.began is None:
        task.began = service.store, service.sessions.recorder.watch_deletions()
    end, names = "", task.known_names
    streamed = request.app[STREAMED].enter(request[TENANT].scope, names) if names else None
    try:
        async with fan_out(
            service.sessions, task, parallel=n_slots, events_max=events_max
        ) as events:
            yield events
    except (ConnectionError, asyncio.CancelledError):
        end = "the client left"
        raise
    finally:
        del under_way[task.wire.id]
        task.close()
        if task.has_more_to_keep:
            service.sessions.see_through(_keep_rest(task, streamed))
        elif streamed is not None:
            streamed.end()
        _log_ended(request, task, title, end)


async def _keep_rest(task: Task, streamed: StreamedResponse | None) -> None:
    if streamed is not None:
        streamed.stopped()
    try:
        await task.keep_rest()
    finally:
        if streamed is not None:
            streamed.end()


def _log_ended(request: web.Request, task: Task, title: str, end: str) -> None:
    choices = task.choices
    answered = [
        RecentRequest(task.wire.id, task.scope, choice.finish, choice.ttft_s)
        for choice in choices
        if choice.finish is not None
    ]
    request.app[RECENT].extend(answered)
    finishes = [each.finish for each in answered]

    def write(divergence: Divergence | None) -> None:
        if choices[0].finish is not None:
            answered[0].divergence = divergence
        log_finished(
            request,
            title,
            total([choice.reuse for choice in choices]),
            timings_of([finish.timings for finish in finishes]),
            id=short_id(task.wire.id),
            divergence=divergence,
            session=finishes[0].session if finishes else "",
            ttft_s=choices[0].ttft_s,
            end=end,
        )

    if end or len(finishes) == len(choices):
        find_divergence(request, task, write)


async def _whole(request: web.Request, task: Task, title: str) -> web.StreamResponse:
    body, bodies = b"", request.app[BODIES]
    async with _running(request, task, title) as events:
        while (item := await events.next()) is not None:
            index, event = item
            _absorb(request, task, index, event)
            bodies.reply_arrived(request, task.bytes_arrived())
            if task.outgrows_claim:
                await bodies.claim_reply(request, *task.bytes_to_claim())
            if isinstance(event, Finish):
                async with bodies.writing_reply(request):
                    body = await task.final(index, event)
    bodies.reply_written(request)
    reply = await whole_reply(request, body)
    reply.headers[REUSE_HEADER] = total([choice.reuse for choice in task.choices]).header()
    finish = task.choices[0].finish
    if finish is not None and finish.session:
        reply.headers[SESSION_HEADER] = finish.session
    return reply


def _absorb(request: web.Request, task: Task, index: int, event: Event) -> None:
    choice, metrics = task.choices[index], request.app[METRICS]
    task.absorb(index, event)
    if isinstance(event, Started) and choice.ttft_s is not None:
        metrics.ttft.observe(choice.ttft_s)
    elif isinstance(event, Finish):
        metrics.finished(event)
        _note_slot(request, task, index, event)


def _note_slot(request: web.Request, task: Task, index: int, finish: Finish) -> None:
    """Remember which chat a slot has: the one that its request names, else where it ran."""
    if finish.n_cached and not finish.truncated and task.began is not None:
        prompt = task.prompt_of(index)
        chat = SlotChat(prompt, finish.ids, finish.n_cached, task.scope, *task.began)
        request.app[BOOK].note(task.slot_of(finish), chat)


async def _stream(
    request: web.Request, task: Task, stream: QueuedStream | KeptStream, title: str
) -> None:
    """Stream the events. A failure before the first one is an ordinary error reply."""
    async with _running(request, task, title) as events:
        await _pass_on(request, task, events, stream)


async def _pass_on(
    request: web.Request, task: Task, events: Events, stream: QueuedStream | KeptStream
) -> None:
    ping_s = task.ping_s
    try:
        item = await events.next(ping_s)
        is_silent = False
    except TimeoutError:
        item, is_silent = None, True
    headers: dict[str, str] = {}
    if item is not None and len(task.choices) == 1 and isinstance(item[1], Started | Finish):
        headers[REUSE_HEADER] = item[1].reuse.header()
    await stream.open(headers)
    try:
        if is_silent:
            await stream.write(PING)
            item = await _next(ping_s, stream, events)
        while item is not None:
            index, event = item
            _absorb(request, task, index, event)
            await stream.write(await task.events(index, event))
            item = await _next(ping_s, stream, events)
        await stream.write(task.writer.end())
    except TowerdError as error:
        task.error = error
        log_refused(request, error.status, error.kind, error.public)
        await stream.write(error_event(request.path, error))
    except ClientStalled:
        log.warning("a client stopped reading its stream; the request was cancelled")
        raise
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        log.exception("a stream failed")
        hidden = task.error = unforeseen(error, "Internal error; see the daemon's log")
        await stream.write(error_event(request.path, hidden))


async def _next(
    ping_s: float | None, stream: QueuedStream | KeptStream, events: Events
) -> tuple[int, Event] | None:
    """The next event; writes pings while there is none."""
    while True:
        try:
            return await events.next(ping_s)
        except TimeoutError:
            await stream.write(PING)
