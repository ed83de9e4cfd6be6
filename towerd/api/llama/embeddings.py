"""POST /embeddings and /rerank, in llama-server's, OpenAI's, Jina's and TEI's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api.http.body import read_bytes
from towerd.api.http.keys import METRICS, service_of
from towerd.api.http.reply import raw_reply
from towerd.api.http.request_log import log_embedded
from towerd.api.http.translation import whole_reply
from towerd.engine.base import Embeds, Engine
from towerd.errors import InvalidRequest, NotSupported

if TYPE_CHECKING:
    from towerd.wire import EmbeddingRequest, Model, RerankRequest

T = TypeVar("T")


async def post_rerank(request: web.Request) -> web.Response:
    """Jina's rerank, or TEI's if the body has `texts`."""
    engine = service_of(request).engine
    if engine.embedder is None or engine.embedder.pooling != "rank":
        raise NotSupported("This server does not support reranking. Start it with `--reranking`")
    body = await read_bytes(request)
    wire = engine.wire
    asked = await wire.call(len(body), _rerank_request, wire.model, body)
    prompts = asked.prompts
    scores = await _all([engine.embedder.score(ids) for ids in prompts])
    log_embedded(request, sum(map(len, prompts)))
    return raw_reply(await wire.call(0, asked.reply, scores))


def embedding(*, openai: bool) -> Handler:
    """The handler of llama-server's embeddings, or of OpenAI's."""

    async def handle(request: web.Request) -> web.StreamResponse:
        engine = service_of(request).engine
        embedder = _embedder(engine)
        if openai and embedder.pooling == "none":
            raise InvalidRequest(
                "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
            )
        body = await read_bytes(request)
        wire = engine.wire
        asked = await wire.call(len(body), _embedding_request, wire.model, openai, body)
        prompts = asked.prompts
        rows = await _all([embedder.embed(ids, asked.normalize) for ids in prompts])
        n_tokens = sum(map(len, prompts))
        request.app[METRICS].prompt_tokens.inc(n_tokens)
        log_embedded(request, n_tokens)
        return await whole_reply(request, await wire.call(0, asked.reply, rows))

    return handle


post_embeddings = embedding(openai=False)
post_openai_embeddings = embedding(openai=True)


async def _all(running: Sequence[Future[T]]) -> list[T]:
    """Every result, in order. After a failure, or once the client has left, no other is started."""
    try:
        return [await asyncio.wrap_future(one) for one in running]
    finally:
        for one in running:
            one.cancel()


def _embedder(engine: Engine) -> Embeds:
    if engine.embedder is None:
        raise NotSupported("This server does not support embeddings. Start it with `--embeddings`")
    return engine.embedder


def _embedding_request(model: Model, openai: bool, body: bytes) -> EmbeddingRequest:
    from towerd.wire import EmbeddingRequest

    return EmbeddingRequest(model, openai, body or b"{}")


def _rerank_request(model: Model, body: bytes) -> RerankRequest:
    from towerd.wire import RerankRequest

    return RerankRequest(model, body or b"{}")
