"""Every endpoint that generates: llama-server's own, OpenAI's, Anthropic's and infill.

`towerd.wire` reads the body and writes the reply; this module adds what towerd knows about reuse:
the reuse header, and the `towerd` object of a reply's last event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from towerd.api.http.backlog import QueuedStream
from towerd.api.http.bodies import release_body
from towerd.api.http.body import read_bytes
from towerd.api.http.hints import SESSION_HEADER, hints_of
from towerd.api.http.kept_stream import KeptStream
from towerd.api.http.keys import CONFIG, LIMITS, METRICS, STREAMS, TENANT, service_of
from towerd.api.http.reply import error_event, raw_reply
from towerd.api.http.requests.log import log_finished, log_refused, title_for
from towerd.api.http.requests.recent import RECENT
from towerd.api.http.sse import PING, ClientStalled, Sink
from towerd.api.llama.choice import ChoiceState
from towerd.api.llama.fanout import Events, fan_out
from towerd.api.llama.reuse import timings_of, total
from towerd.api.llama.streams import CONVERSATION, follow, key_of
from towerd.api.llama.task import RUNNING, Caller, Task, parse_task
from towerd.engine.base import Event, Finish, Started
from towerd.errors import TowerdError

if TYPE_CHECKING:
    from towerd.wire import Endpoint

log = logging.getLogger(__name__)

REUSE_HEADER = "X-Towerd-Reuse"


async def post_completion(request: web.Request) -> web.StreamResponse:
    """llama-server's native completion."""
    return await _complete(request, "completion")


async def post_infill(request: web.Request) -> web.StreamResponse:
    """llama-server's fill-in-the-middle."""
    return await _complete(request, "infill")


async def post_openai_completion(request: web.Request) -> web.StreamResponse:
    """OpenAI's text completion."""
    return await _complete(request, "completions")


async def post_chat(request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completion."""
    return await _complete(request, "chat")


async def post_responses(request: web.Request) -> web.StreamResponse:
    """OpenAI's Responses."""
    return await _complete(request, "responses")


async def post_messages(request: web.Request) -> web.StreamResponse:
    """Anthropic's Messages."""
    return await _complete(request, "messages")


async def _complete(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    service = service_of(request)
    tenant = request[TENANT]
    caller = Caller(tenant.scope, hints_of(request), tenant.sees_all)
    body = await read_bytes(request)
    task = await parse_task(endpoint, body, caller, service.engine, request.app[CONFIG])
    title = await title_for(request, body)
    del body
    release_body(request)
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
async def _running(request: web.Request, task: Task) -> AsyncIterator[Events]:
    service, under_way = service_of(request), request.app[RUNNING]
    running = fan_out(
        service.sessions,
        [task.request_of(k) for k in range(task.n_choices)],
        parallel=service.engine.n_slots,
        events_max=request.app[LIMITS].events_max,
    )
    under_way[task.wire.id] = task
    try:
        async with running as events:
            yield events
    finally:
        del under_way[task.wire.id]
        task.close()


async def _whole(request: web.Request, task: Task, title: str) -> web.StreamResponse:
    choices = [ChoiceState() for _ in range(task.n_choices)]
    with _logged(request, title, choices):
        async with _running(request, task) as events:
            body = await _body(request, task, choices, events)
    reply = raw_reply(body)
    reply.headers.update(_headers(choices))
    return reply


async def _body(
    request: web.Request, task: Task, choices: list[ChoiceState], events: Events
) -> bytes:
    body = b""
    while (item := await events.next()) is not None:
        index, event = item
        _absorb(request, task, choices[index], event)
        if isinstance(event, Finish):
            body = await task.final(index, event)
    return body


def _absorb(request: web.Request, task: Task, choice: ChoiceState, event: Event) -> None:
    choice.absorb(event)
    metrics = request.app[METRICS]
    if isinstance(event, Started):
        metrics.started(choice.began)
    elif isinstance(event, Finish):
        metrics.finished(event)
        request.app[RECENT].add(task.template.scope, event, choice.ttft_s)


def _headers(choices: Sequence[ChoiceState]) -> dict[str, str]:
    headers = {REUSE_HEADER: total([choice.reuse for choice in choices]).header()}
    finish = choices[0].finish
    if finish is not None and finish.session:
        headers[SESSION_HEADER] = finish.session
    return headers


@contextmanager
def _logged(request: web.Request, title: str, choices: Sequence[ChoiceState]) -> Iterator[None]:
    """Log the request when it has ended. An error reply is logged where it is made."""
    end = ""
    try:
        yield
    except (ConnectionError, ClientStalled, asyncio.CancelledError):
        end = "the client left"
        raise
    finally:
        finishes = [choice.finish for choice in choices if choice.finish is not None]
        if end or len(finishes) == len(choices):
            log_finished(
                request,
                title,
                total([choice.reuse for choice in choices]),
                timings_of([finish.timings for finish in finishes]),
                session=finishes[0].session if finishes else "",
                ttft_s=choices[0].ttft_s,
                end=end,
            )


async def _stream(request: web.Request, task: Task, stream: Sink, title: str) -> None:
    """Stream the events. A failure before the first one is an ordinary error reply."""
    choices = [ChoiceState() for _ in range(task.n_choices)]
    with _logged(request, title, choices):
        async with _running(request, task) as events:
            await _pass_on(request, task, events, stream, choices)


async def _pass_on(
    request: web.Request, task: Task, events: Events, stream: Sink, choices: list[ChoiceState]
) -> None:
    ping_s = task.ping_s
    try:
        item = await events.next(ping_s)
        is_silent = False
    except TimeoutError:
        item, is_silent = None, True
    headers: dict[str, str] = {}
    if item is not None and len(choices) == 1 and isinstance(item[1], Started | Finish):
        headers[REUSE_HEADER] = item[1].reuse.header()
    await stream.open(headers)
    try:
        if is_silent:
            await stream.write(PING)
            item = await _next(ping_s, stream, events)
        while item is not None:
            index, event = item
            _absorb(request, task, choices[index], event)
            await stream.write(await task.events(index, event))
            item = await _next(ping_s, stream, events)
        await stream.write(task.writer.end())
    except TowerdError as error:
        log_refused(request, error.status, error.kind, error.public)
        await stream.write(error_event(request.path, error))
    except ClientStalled:
        log.warning("a client stopped reading its stream; the request was cancelled")
        raise
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("a stream failed")
        hidden = TowerdError("Internal error; the daemon's log has it")
        await stream.write(error_event(request.path, hidden))


async def _next(ping_s: float | None, stream: Sink, events: Events) -> tuple[int, Event] | None:
    """The next event; writes pings while there is none."""
    while True:
        try:
            return await events.next(ping_s)
        except TimeoutError:
            await stream.write(PING)
