"""POST /completion, /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from aiohttp import web

from towerd.api import shapes
from towerd.api.body import read_object
from towerd.api.choice import Choice
from towerd.api.fanout import Events, fan_out
from towerd.api.hints import SESSION_HEADER, hints_of
from towerd.api.keys import CONFIG, LIMITS, METRICS, TENANT, Service, service_of
from towerd.api.off_loop import by_size, release
from towerd.api.reply import error_event, json_reply
from towerd.api.sse import ClientStalled, EventStream
from towerd.api.task import Caller, Shape, Task, parse_task
from towerd.engine.base import Event, Finish, Piece, Progress, Reuse, Started
from towerd.errors import TowerdError

log = logging.getLogger(__name__)

REUSE_HEADER = "X-Towerd-Reuse"


async def post_completion(request: web.Request) -> web.StreamResponse:
    """llama-server's native completion."""
    return await _complete(request, Shape.NATIVE)


async def post_openai_completion(request: web.Request) -> web.StreamResponse:
    """OpenAI's text completion."""
    return await _complete(request, Shape.COMPLETION)


async def post_chat(request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completion."""
    return await _complete(request, Shape.CHAT)


async def _complete(request: web.Request, shape: Shape) -> web.StreamResponse:
    service = service_of(request)
    limits = request.app[LIMITS]
    caller = Caller(request[TENANT].scope, hints_of(request))
    config = request.app[CONFIG]
    ids_max = max(config.prompt_tokens_max, service.engine.n_ctx)
    body = await read_object(request, ids_max)
    try:
        task = await parse_task(body, shape, caller, service.engine, config, limits)
    finally:
        await release(body)
    choices = [
        Choice(index, generate, keep=not task.stream)
        for index, generate in enumerate(task.requests)
    ]
    running = fan_out(
        service.sessions,
        task.requests,
        parallel=service.engine.n_slots,
        events_max=limits.events_max,
    )
    async with running as events:
        if task.stream:
            return await _stream(request, task, choices, events, service)
        while (item := await events.next()) is not None:
            _absorb(request, choices[item[0]], item[1])
    prompts = await _prompts(task, choices, service)
    return await by_size(shapes.weight(choices), _whole_reply, task, choices, prompts)


def _whole_reply(task: Task, choices: list[Choice], prompts: list[str]) -> web.Response:
    return json_reply(shapes.whole(task, choices, prompts), headers=_headers(choices))


def _absorb(request: web.Request, choice: Choice, event: Event) -> None:
    choice.absorb(event)
    metrics = request.app[METRICS]
    if isinstance(event, Started):
        metrics.started(choice.began)
    elif isinstance(event, Finish):
        metrics.finished(event)


def _headers(choices: Sequence[Choice]) -> dict[str, str]:
    parts = [choice.reuse for choice in choices]
    kept = [reuse.kept for reuse in parts if reuse.kept is not None]
    total = Reuse(
        live=sum(reuse.live for reuse in parts),
        hot=sum(reuse.hot for reuse in parts),
        warm=sum(reuse.warm for reuse in parts),
        prefill=sum(reuse.prefill for reuse in parts),
        approximate=sum(reuse.approximate for reuse in parts),
        cold=sum(reuse.cold for reuse in parts),
        kept=sum(kept) if kept else None,
    )
    headers = {REUSE_HEADER: total.header()}
    finish = choices[0].finish
    if finish is not None and finish.session:
        headers[SESSION_HEADER] = finish.session
    return headers


async def _prompts(task: Task, choices: Sequence[Choice], service: Service) -> list[str]:
    if not shapes.needs_prompt(task):
        return [""] * len(choices)
    texts: list[str] = []
    for index, choice in enumerate(choices):
        if index % task.n_per_prompt == 0:
            raw = await service.engine.detokenize(choice.request.ids)
            texts.append(raw.decode("utf-8", "replace"))
        else:
            texts.append(texts[-1])
    return texts


async def _stream(
    request: web.Request, task: Task, choices: list[Choice], events: Events, service: Service
) -> web.StreamResponse:
    """Stream the events. Whatever fails before the first one is an ordinary error reply."""
    try:
        item = await events.next(task.ping_s)
        silent = False
    except TimeoutError:
        item, silent = None, True
    headers: dict[str, str] = {}
    if item is not None and len(choices) == 1 and isinstance(item[1], Started | Finish):
        headers[REUSE_HEADER] = item[1].reuse.header()
    stream = EventStream(request, headers)
    await stream.prepare()
    try:
        if silent:
            await stream.ping()
            item = await _next(task, stream, events)
        while item is not None:
            index, event = item
            await stream.send(await _chunks(request, task, choices[index], event, service))
            item = await _next(task, stream, events)
        if task.include_usage and task.shape is Shape.CHAT:
            await stream.send([shapes.chat_usage(task, choices)])
        if task.shape is not Shape.NATIVE:
            await stream.done()
    except TowerdError as error:
        await stream.send([error_event(error)])
    except ClientStalled:
        log.warning("a client stopped reading its stream; the request was cancelled")
        raise
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("a stream failed")
        await stream.send([TowerdError("Internal error; the daemon's log has it").body()])
    await stream.close()
    return stream.response


async def _next(task: Task, stream: EventStream, events: Events) -> tuple[int, Event] | None:
    """The next event, with pings while there is none."""
    while True:
        try:
            return await events.next(task.ping_s)
        except TimeoutError:
            await stream.ping()


async def _chunks(
    request: web.Request, task: Task, choice: Choice, event: Event, service: Service
) -> list[shapes.Json]:
    first = choice.n_decoded == 0 and isinstance(event, Piece)
    _absorb(request, choice, event)
    if isinstance(event, Piece):
        return shapes.partial(task, choice, event, None, first)
    if isinstance(event, Progress):
        return shapes.partial(task, choice, None, event, False)
    if isinstance(event, Finish):
        prompt = (await _prompts(task, [choice], service))[0]
        return await by_size(shapes.weight([choice]), shapes.last, task, choice, prompt)
    return []
