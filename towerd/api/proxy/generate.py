"""Generation through llama-server: a slot is prepared, the request is forwarded pinned to it, and
the turn is recorded before the reply's last part is sent."""

from __future__ import annotations

import asyncio

from aiohttp import web

from towerd.api.http.body import decode, read_bytes
from towerd.api.http.hints import hints_of
from towerd.api.http.keys import TENANT, TENANTS, service_of
from towerd.api.http.off_loop import release
from towerd.api.http.requests.log import title_for
from towerd.api.proxy.conversations import with_conversation
from towerd.api.proxy.exchange import Exchange
from towerd.api.proxy.forward import copy
from towerd.api.proxy.headers import to_upstream
from towerd.api.proxy.link import LINK, llama_server_of
from towerd.api.proxy.mending import mended
from towerd.api.proxy.plan import Placement, ProxyPlan, check_fits, learn, make_plan
from towerd.api.proxy.remote_media import check_media
from towerd.api.proxy.watch import Dialect
from towerd.cold.cold_tier import RequestGuard
from towerd.engine.base import GenerateRequest
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.slots.slot_lease import SlotLease
from towerd.errors import InvalidRequest

INFILL = "infill"


async def post_completion(request: web.Request) -> web.StreamResponse:
    """llama-server's native completion."""
    return await _generate(request, Dialect.NATIVE)


async def post_openai_completion(request: web.Request) -> web.StreamResponse:
    """OpenAI's text completion."""
    return await _generate(request, Dialect.COMPLETION)


async def post_chat(request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completion, with tools and media."""
    return await _generate(request, Dialect.CHAT)


async def post_responses(request: web.Request) -> web.StreamResponse:
    """OpenAI's Responses."""
    return await _generate(request, Dialect.RESPONSES)


async def post_messages(request: web.Request) -> web.StreamResponse:
    """Anthropic's Messages. llama-server does not let them name a slot."""
    return await _generate(request, Dialect.MESSAGES, can_pin=False)


async def post_infill(request: web.Request) -> web.StreamResponse:
    """Fill in the middle. Only llama-server knows how it assembles the prompt."""
    engine = llama_server_of(request)
    data = await mended(request, Dialect.NATIVE, await read_bytes(request), engine)
    plan = ProxyPlan(Dialect.NATIVE, data, Placement.OPAQUE, label=INFILL)
    try:
        body = await decode(request, data)
    except InvalidRequest:
        body = None
    if not isinstance(body, dict):
        return await _as_it_is(request, engine, plan)
    plan.stream = body.get("stream") is True
    plan.title = await title_for(request, data)
    plan.hides_end = bool(body.get("response_fields"))
    if body.get("n_cmpl", 1) != 1 or body.get("n", 1) != 1:
        return await _free(request, engine, plan)
    return await _pinned(request, engine, plan)


async def _generate(
    request: web.Request, dialect: Dialect, *, can_pin: bool = True
) -> web.StreamResponse:
    engine = llama_server_of(request)
    hints_of(request)  # refuse invalid hints before anything else
    data = await mended(request, dialect, await read_bytes(request), engine)
    body = await decode(request, data)
    if not isinstance(body, dict) or not _has_prompt(dialect, body):
        return await _as_it_is(request, engine, ProxyPlan(dialect, data, Placement.FREE))
    try:
        await check_media(body)
        plan = await make_plan(dialect, data, body, engine, can_pin=can_pin)
    finally:
        await release(body)
    plan.title = await title_for(request, data)
    if plan.placement is Placement.FREE:
        return await _free(request, engine, plan)
    if plan.chat is not None:
        session = hints_of(request).session
        lease = engine.lease_chat(plan.chat, request[TENANT].scope, session)
        if lease is not None:
            return await _continue_chat(request, engine, plan, lease)
        await learn(plan, engine)
        check_fits(plan, engine.n_ctx)
    return await _pinned(request, engine, plan)


async def _continue_chat(
    request: web.Request, engine: LlamaServerEngine, plan: ProxyPlan, lease: SlotLease
) -> web.StreamResponse:
    """Continue a chat in its slot: its placement does not depend on its tokens, so they are
    determined while it runs. If llama-server refuses the request, its reply says so."""
    exchange = Exchange(request, engine, plan)
    exchange.lease = _named(request, plan, lease)
    exchange.is_resumable = with_conversation(request, exchange.headers) and plan.stream

    async def learn_tokens() -> None:
        await learn(plan, engine)
        if plan.ids is not None:
            lease.learn(plan.ids)
            exchange.use = _entered(request, plan)

    exchange.learning = asyncio.create_task(learn_tokens())
    return await exchange.run()


def _has_prompt(dialect: Dialect, body: dict[str, object]) -> bool:
    """Whether there is anything to evaluate; if not, llama-server's error says what is wrong."""
    name = {Dialect.NATIVE: "prompt", Dialect.COMPLETION: "prompt", Dialect.RESPONSES: "input"}
    return body.get(name.get(dialect, "messages")) is not None


async def _as_it_is(
    request: web.Request, engine: LlamaServerEngine, plan: ProxyPlan
) -> web.StreamResponse:
    """Forward a request that llama-server will presumably refuse."""
    headers = to_upstream(request.headers, engine.upstream.auth())
    path, data = request.rel_url.raw_path_qs, plan.body
    async with engine.unpinned():
        reply = await request.app[LINK].request(engine, request.method, path, headers, data)
        try:
            return await copy(request, reply)
        finally:
            reply.close()


async def _free(
    request: web.Request, engine: LlamaServerEngine, plan: ProxyPlan
) -> web.StreamResponse:
    """Forward a request that llama-server places itself. Reuse from slots would leak information
    between tenants, so with several tenants it is disabled."""
    if request.app[TENANTS].required:
        plan.fields["cache_prompt"] = False
    exchange = Exchange(request, engine, plan)
    with_conversation(request, exchange.headers)
    async with engine.unpinned() as unpinned:
        exchange.unpinned = unpinned
        return await exchange.run()


async def _pinned(
    request: web.Request, engine: LlamaServerEngine, plan: ProxyPlan
) -> web.StreamResponse:
    exchange = Exchange(request, engine, plan)
    exchange.use = _entered(request, plan)
    try:
        exchange.lease = await _lease(request, engine, plan)
    except BaseException:
        if exchange.use is not None:
            exchange.use.leave()
        raise
    exchange.is_resumable = with_conversation(request, exchange.headers) and plan.stream
    return await exchange.run()


def _entered(request: web.Request, plan: ProxyPlan) -> RequestGuard | None:
    """Announce the request to the cold tier, which thaws the session that it continues."""
    if plan.ids is None:
        return None
    asked = GenerateRequest(
        ids=plan.ids, scope=request[TENANT].scope, session=hints_of(request).session
    )
    return service_of(request).cold.enter(asked)


async def _lease(request: web.Request, engine: LlamaServerEngine, plan: ProxyPlan) -> SlotLease:
    scope = request[TENANT].scope
    if plan.ids is None:
        return await engine.lease_opaque(scope, label=plan.label)
    session = hints_of(request).session
    lease = await engine.lease(plan.ids, scope, session, compose=plan.compose, pinned=plan.can_pin)
    return _named(request, plan, lease)


def _named(request: web.Request, plan: ProxyPlan, lease: SlotLease) -> SlotLease:
    hints = hints_of(request)
    lease.workflow, lease.agent = hints.workflow, hints.agent or plan.agent
    return lease
