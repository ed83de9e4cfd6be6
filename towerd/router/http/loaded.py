"""Requests that every loaded model answers, each for itself."""

from __future__ import annotations

import asyncio

from aiohttp import web

from towerd.api.http.body import read_bytes
from towerd.api.relay.headers import from_towerd
from towerd.engine.llama_server.process.client import Lost, read_all
from towerd.errors import NotFound, TowerdError
from towerd.router.http.forward import MODELS, forward_store
from towerd.router.http.request import READING, RoutedRequest
from towerd.router.loading.model import RoutedModel, State


async def ask_loaded(
    request: web.Request, models: list[RoutedModel], body: bytes
) -> list[web.Response]:
    """The answers of those of the models that are loaded. One whose process ends has none; for none
    of them it counts as a use."""
    loaded = [each for each in models if each.state is State.LOADED]
    answers = await asyncio.gather(*(_ask(request, each, body) for each in loaded))
    return [each for each in answers if each is not None]


async def _ask(request: web.Request, model: RoutedModel, body: bytes) -> web.Response | None:
    routed = RoutedRequest(request.app[MODELS], model, request, body, is_use=False, may_load=False)
    try:
        await routed.open()
        assert routed.reply is not None
        reply = routed.reply
        body = await read_all(reply)
        return web.Response(status=reply.status, headers=from_towerd(reply.headers), body=body)
    except (TowerdError, Lost):
        return None
    finally:
        routed.close()


async def ask_whoever_knows(request: web.Request) -> web.StreamResponse:
    """Pass on what is about a workflow or a request to every loaded model, or the one that the query
    names: each knows its own. Raises NotFound if none is loaded."""
    if request.query.get("model"):
        return await forward_store(request)
    body = b"" if request.method in READING else await read_bytes(request)
    answers = await ask_loaded(request, request.app[MODELS].loaded(), body)
    if not answers:
        raise NotFound(f"no loaded model knows {request.match_info['id'][:50]!r}")
    return min(answers, key=lambda each: (each.status >= 400, each.status == 404))
