"""POST /api/embed and /api/embeddings, answered by the route of OpenAI's embeddings."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api.http import fields
from towerd.api.http.arrival import ARRIVED
from towerd.api.http.body import PEEKED, decode, read_bytes
from towerd.api.http.fields import INT32_MAX, Body
from towerd.api.http.off_loop import by_size, release
from towerd.api.http.reply import encode, json_reply
from towerd.api.http.translation import TRANSLATION
from towerd.api.ollama.asked import asked_of
from towerd.api.ollama.generation import ITEM_BYTES
from towerd.api.ollama.keep_alive import keep_alive
from towerd.api.ollama.replies import EmbedReply
from towerd.errors import InvalidRequest

EMBEDDINGS = "/v1/embeddings"


def embedding(embeddings: Handler, *, one: bool) -> Handler:
    """The handler of /api/embed, or with `one` of the older /api/embeddings. embeddings: that of OpenAI's."""

    async def handle(request: web.Request) -> web.StreamResponse:
        empty = await _translate(request, one=one)
        return await embeddings(request) if empty is None else empty

    return handle


async def _translate(request: web.Request, *, one: bool) -> web.Response | None:
    """Make a request ready for the route of OpenAI's; or the whole reply to one without text."""
    data = await read_bytes(request)
    asked = await asked_of(request, data)
    model = asked.model_name()
    stays_s = asked.keep_alive_s()
    body = await decode(request, data)
    texts = [fields.string(body, "prompt", "")] if one else _texts(body)
    n_dimensions = fields.integer_in(body, ("dimensions",), 0, 0, INT32_MAX)
    keep_alive(request, stays_s)
    if not any(texts):  # such a request only loads the model
        return json_reply({"embedding": []} if one else {"model": model, "embeddings": []})
    n_items = len(data) // ITEM_BYTES
    request[PEEKED] = await by_size(n_items, encode, {"input": texts, "model": model})
    await release(body)
    request[TRANSLATION] = EmbedReply(EMBEDDINGS, model, n_dimensions, request[ARRIVED], one=one)
    return None


def _texts(body: Body) -> list[str]:
    found = body.get("input")
    texts = [found] if isinstance(found, str) else [] if found is None else found
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise InvalidRequest("Field 'input': must be a string or an array of strings")
    return texts
