"""POST /embeddings and /rerank, in llama-server's, OpenAI's, Jina's and TEI's shapes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from towerd.api.body import read_bytes
from towerd.api.keys import METRICS, service_of
from towerd.api.reply import raw_reply
from towerd.api.task import wire_of
from towerd.engine.base import Embeds, Engine
from towerd.errors import InvalidRequest, NotSupported

if TYPE_CHECKING:
    from towerd.wire import EmbeddingRequest, Model, RerankRequest


async def post_embeddings(request: web.Request) -> web.Response:
    """llama-server's embeddings."""
    return await _embed(request, openai=False)


async def post_openai_embeddings(request: web.Request) -> web.Response:
    """OpenAI's embeddings."""
    return await _embed(request, openai=True)


async def post_rerank(request: web.Request) -> web.Response:
    """Jina's rerank, or TEI's if the body has `texts`."""
    engine = service_of(request).engine
    if engine.embedder is None or engine.embedder.pooling != "rank":
        raise NotSupported(
            "This server does not support reranking. Start it with `--reranking`", status=501
        )
    body = await read_bytes(request)
    wire = wire_of(engine)
    asked = await wire.call(len(body), _rerank_request, wire.model, body)
    scores = await asyncio.to_thread(engine.embedder.score, asked.prompts)
    return raw_reply(await wire.call(0, asked.reply, scores))


async def _embed(request: web.Request, *, openai: bool) -> web.Response:
    engine = service_of(request).engine
    embedder = _embedder(engine)
    if openai and embedder.pooling == "none":
        raise InvalidRequest(
            "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
        )
    body = await read_bytes(request)
    wire = wire_of(engine)
    asked = await wire.call(len(body), _embedding_request, wire.model, openai, body)
    prompts = asked.prompts
    rows = await asyncio.to_thread(embedder.embed, prompts, asked.normalize)
    request.app[METRICS].embedded(sum(map(len, prompts)))
    return raw_reply(await wire.call(0, asked.reply, rows))


def _embedder(engine: Engine) -> Embeds:
    if engine.embedder is None:
        raise NotSupported(
            "This server does not support embeddings. Start it with `--embeddings`", status=501
        )
    return engine.embedder


def _embedding_request(model: Model, openai: bool, body: bytes) -> EmbeddingRequest:
    from towerd.wire import EmbeddingRequest

    return EmbeddingRequest(model, openai, body or b"{}")


def _rerank_request(model: Model, body: bytes) -> RerankRequest:
    from towerd.wire import RerankRequest

    return RerankRequest(model, body or b"{}")
