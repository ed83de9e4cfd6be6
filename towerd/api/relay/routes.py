"""How each of llama-server's endpoints is handled in front of a llama-server.

Requests to other endpoints are forwarded as well; see `unknown`.
"""

from __future__ import annotations

import asyncio
import re
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

from aiohttp import web

from towerd.api.http.access import is_own_slot, require_admin, slot_numbers
from towerd.api.http.gate import Asleep
from towerd.api.http.keys import CONFIG, GATE, TENANT
from towerd.api.http.reply import json_reply, raw_reply
from towerd.api.llama import completion, info, mcp_proxy, slots, streams, text
from towerd.api.ollama import models as ollama_models
from towerd.api.ollama.bodies import CHAT, COMPLETION, INFILL
from towerd.api.ollama.embedding import embedding
from towerd.api.ollama.generation import chatting, generating
from towerd.api.relay.forward import (
    DOWN,
    body_of,
    copy,
    forward,
    forward_unpinned,
    llama_server_of,
    send,
)
from towerd.api.relay.media import forward_embeddings, with_counted_media, with_media
from towerd.engine.base import SlotView
from towerd.engine.llama_server.process.upstream_client import UpstreamGone
from towerd.errors import NotFound, SwitchedOff, TowerdError

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.engine.llama_server.engine import LlamaServerEngine

PRIVATE_FIELDS = ("prompt", "generated")
"""Fields of GET /slots that contain users' text."""
IDLE_FIELDS = ("id", "n_ctx", "speculative")
"""Fields shown of a slot that another tenant uses, beside whether it is busy."""


_THEIRS = b"llamacpp:"
_RATES = re.compile(rb"^(llamacpp:(?:prompt|predicted)_tokens_seconds) .*$", re.MULTILINE)
"""Averages since the last scrape."""
_PREFIXES = (_THEIRS, b"# HELP " + _THEIRS, b"# TYPE " + _THEIRS)


async def get_props(request: web.Request) -> web.StreamResponse:
    """llama-server's properties."""
    if not request.app[CONFIG].props_endpoint:
        raise SwitchedOff("This server does not support props endpoint. Start it with `--props`")
    if (asleep := request.app[GATE].asleep) is not None:
        return json_reply(asleep.props)
    if request.app[CONFIG].ui_mcp_proxy:
        return json_reply(await _props(request.app))
    return await forward(request)


async def _props(app: web.Application) -> dict[str, Any]:
    engine = cast("LlamaServerEngine", app[GATE].open().engine)
    props: dict[str, Any] = await _read(engine, "/props")
    return props | {"cors_proxy_enabled": app[CONFIG].ui_mcp_proxy}


async def _read(engine: LlamaServerEngine, path: str) -> Any:
    """What llama-server answers. Raises Unavailable."""
    engine.availability.check()
    try:
        return await engine.upstream.get(path)
    except UpstreamGone as error:
        engine.availability.notice(error)
        raise engine.availability.failure(DOWN) from error


async def get_health(request: web.Request) -> web.StreamResponse:
    """llama-server's health; a model that sleeps is well."""
    if request.app[GATE].asleep is not None:
        return await info.get_health(request)
    return await forward(request)


async def get_models(request: web.Request) -> web.StreamResponse:
    """llama-server's model."""
    if (asleep := request.app[GATE].asleep) is not None:
        return json_reply(asleep.models)
    return await forward(request)


async def asleep(app: web.Application) -> Asleep:
    """What is answered while the model, and with it the llama-server, sleeps."""
    service = app[GATE].open()
    engine = cast("LlamaServerEngine", service.engine)
    props = await _props(app) | {"is_sleeping": True}
    models = await _read(engine, "/v1/models")
    stats = await info.all_stats(service)
    own = await info.own_stats(app, service, stats) | {"is_sleeping": True}
    try:
        theirs = engine.without_own(await engine.upstream.metrics())
    except TowerdError:
        theirs = b""
    return Asleep(props, models, stats, own, engine.info, engine.n_ctx, theirs)


async def get_slots(request: web.Request) -> web.StreamResponse:
    """llama-server's slots, without any text. Of those of other tenants a caller with the overview
    sees that they are busy; to others they look idle."""
    if not request.app[CONFIG].slots_endpoint:
        raise SwitchedOff("This server does not support slots endpoint. Start it with `--slots`")
    engine = llama_server_of(request)
    # Whether all are busy (`?fail_on_no_slot=`) is not told to one of several tenants.
    path = request.rel_url.raw_path_qs if request[TENANT].sees_all else "/slots"
    slots: list[dict[str, Any]] = await _read(engine, path)
    shown = [{k: v for k, v in slot.items() if k not in PRIVATE_FIELDS} for slot in slots]
    if request[TENANT].admin:
        return json_reply(shown)
    views = engine.slots()
    numbers = slot_numbers(request, views)
    own = {view.id: view for view in views if is_own_slot(request, view)}
    seen = [
        _as_seen(request, slot, own.get(slot["id"])) | {"id": numbers.get(slot["id"], slot["id"])}
        for slot in shown
    ]
    return json_reply(sorted(seen, key=itemgetter("id")))


def _as_seen(request: web.Request, slot: dict[str, Any], view: SlotView | None) -> dict[str, Any]:
    """What a tenant sees of a slot. view: towerd's view of it, if the tenant uses it."""
    sees_all = request[TENANT].sees_all
    is_shown = view is not None and view.is_processing == slot["is_processing"]
    if not is_shown or not (sees_all or slot["is_processing"]):
        is_busy = sees_all and slot["is_processing"]
        return {k: slot[k] for k in IDLE_FIELDS if k in slot} | {"is_processing": is_busy}
    return {k: v for k, v in slot.items() if sees_all or k != "id_task"}


async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus text: llama-server's own metrics, then towerd's. Without --metrics at llama-server towerd's
    own values of its metrics stay.

    Raises SwitchedOff."""
    reply = await info.get_metrics(request)
    own = reply.body
    if (asleep := request.app[GATE].asleep) is not None:
        theirs, asleep.metrics = asleep.metrics, _RATES.sub(rb"\1 0", asleep.metrics)
    else:
        engine = llama_server_of(request)
        try:
            engine.availability.check()
            theirs = engine.without_own(await engine.upstream.metrics())
        except TowerdError:
            return reply
    if theirs and isinstance(own, bytes):
        reply.body = await asyncio.to_thread(merged, theirs, own)
    return reply


def merged(theirs: bytes, own: bytes) -> bytes:
    """`theirs`, followed by those metrics of `own` that do not have llama-server's names."""
    lines = [line for line in own.splitlines(keepends=True) if not line.startswith(_PREFIXES)]
    return theirs.rstrip(b"\n") + b"\n" + b"".join(lines)


async def forward_admin(request: web.Request) -> web.StreamResponse:
    """Forward a request that changes llama-server for all tenants; for the owner only."""
    require_admin(request)
    return await forward(request)


async def post_lora(request: web.Request) -> web.StreamResponse:
    """Set the scales of LoRA adapters, for requests from now on; rows of other scales are others."""
    require_admin(request)
    engine = llama_server_of(request)
    async with engine.holds.unpinned():
        reply = await send(request, engine, auth=engine.upstream.auth())
        try:
            if reply.status != 200:
                return await copy(request, reply)
            body = await body_of(reply)
        finally:
            reply.close()
        await engine.lora_changed()
    return raw_reply(body)


async def get_root(request: web.Request) -> web.StreamResponse:
    """llama-server's web UI; without one, and while the model loads, the status page."""
    if request.app[GATE].service is None or request.app[GATE].closing:
        raise web.HTTPFound("/towerd/")
    reply = await send(request, llama_server_of(request), auth={})
    if reply.status in (401, 404):
        reply.close()
        raise web.HTTPFound("/towerd/")
    return await copy(request, reply)


async def unknown(request: web.Request) -> web.StreamResponse:
    """Forward a request without a route of its own: files of the web UI, and endpoints of a newer
    llama-server. Raises NotFound for unknown paths below /towerd and /api, and for another spelling of a
    path that has a route, as that would bypass its rules."""
    path = unquote(request.rel_url.raw_path)
    if path == "/towerd" or path.startswith(("/towerd/", "/api/")):
        raise NotFound("File Not Found")
    if is_ruled(path):
        raise NotFound("File Not Found")
    if TENANT not in request:  # a file of the web UI, asked for without a key
        return await copy(request, await send(request, llama_server_of(request), auth={}))
    return await forward_unpinned(request)


def is_ruled(path: str) -> bool:
    """Whether requests to a path, decoded, must not be forwarded unchanged."""
    return path in _RULED or path.startswith("/slots")


_post_chat = with_media(completion.post_chat)
_GENERATING = {
    CHAT: _post_chat,
    COMPLETION: completion.post_completion,
    INFILL: completion.post_infill,
}

ROUTES: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/health", get_health),
    ("GET", "/v1/health", get_health),
    ("GET", "/props", get_props),
    ("POST", "/props", forward_admin),
    ("GET", "/models", get_models),
    ("GET", "/v1/models", get_models),
    ("POST", "/models", forward_admin),
    ("DELETE", "/models", forward_admin),
    ("POST", "/models/load", forward_admin),
    ("POST", "/models/unload", forward_admin),
    ("GET", "/models/sse", forward),
    ("GET", "/metrics", get_metrics),
    ("GET", "/slots", get_slots),
    ("POST", "/slots/{id_slot}", slots.post_slot),
    ("POST", "/completion", with_media(completion.post_completion)),
    ("POST", "/completions", with_media(completion.post_completion)),
    ("POST", "/v1/completions", with_media(completion.post_openai_completion)),
    ("POST", "/chat/completions", _post_chat),
    ("POST", "/v1/chat/completions", _post_chat),
    ("POST", "/v1/chat/completions/control", completion.post_control),
    ("POST", "/responses", with_media(completion.post_responses)),
    ("POST", "/v1/responses", with_media(completion.post_responses)),
    ("POST", "/v1/messages", with_media(completion.post_messages)),
    ("POST", "/infill", completion.post_infill),
    ("POST", "/tokenize", text.post_tokenize),
    ("POST", "/detokenize", text.post_detokenize),
    ("POST", "/apply-template", with_counted_media(text.post_apply_template)),
    ("POST", "/chat/completions/input_tokens", with_counted_media(text.post_chat_tokens)),
    ("POST", "/v1/chat/completions/input_tokens", with_counted_media(text.post_chat_tokens)),
    ("POST", "/responses/input_tokens", with_counted_media(text.post_responses_tokens)),
    ("POST", "/v1/responses/input_tokens", with_counted_media(text.post_responses_tokens)),
    ("POST", "/v1/messages/count_tokens", with_counted_media(text.post_messages_tokens)),
    ("POST", "/embedding", forward_embeddings),
    ("POST", "/embeddings", forward_embeddings),
    ("POST", "/v1/embeddings", forward_embeddings),
    ("POST", "/rerank", forward_embeddings),
    ("POST", "/reranking", forward_embeddings),
    ("POST", "/v1/rerank", forward_embeddings),
    ("POST", "/v1/reranking", forward_embeddings),
    ("POST", "/audio/transcriptions", forward_unpinned),
    ("POST", "/v1/audio/transcriptions", forward_unpinned),
    ("GET", "/lora-adapters", forward),
    ("POST", "/lora-adapters", post_lora),
    ("GET", "/v1/stream", streams.get_stream),
    ("DELETE", "/v1/stream", streams.delete_stream),
    ("POST", "/v1/streams/lookup", streams.post_lookup),
    ("GET", "/tools", forward),
    ("POST", "/tools", forward),
    ("POST", "/api/chat", chatting(_post_chat)),
    ("POST", "/api/generate", generating(_GENERATING)),
    ("POST", "/api/embed", embedding(forward_embeddings, one=False)),
    ("POST", "/api/embeddings", embedding(forward_embeddings, one=True)),
    *ollama_models.ROUTES,
    ("GET", "/cors-proxy", mcp_proxy.forward),
    ("POST", "/cors-proxy", mcp_proxy.forward),
    ("GET", "/", get_root),
)
"""(method, path, handler) of every endpoint of llama-server."""

_RULED = frozenset(path for _, path, handler in ROUTES if handler is not forward)
"""Paths whose other methods and spellings are unknown here: they have rules, or need no key."""
