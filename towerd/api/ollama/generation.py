"""POST /api/chat and /api/generate: the body becomes that of one of our routes, whose reply is translated back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api.http.arrival import ARRIVED
from towerd.api.http.body import PEEKED, decode, read_bytes
from towerd.api.http.fields import Body
from towerd.api.http.keys import service_of
from towerd.api.http.off_loop import by_size, release
from towerd.api.http.reply import encode, json_reply
from towerd.api.http.translation import TRANSLATION
from towerd.api.ollama.asked import asked_of
from towerd.api.ollama.bodies import CHAT, Translated, has_alternatives, of_chat, of_generate
from towerd.api.ollama.keep_alive import keep_alive, unload
from towerd.api.ollama.parts import ChatReader, ReplyPart, TextReader
from towerd.api.ollama.replies import OllamaReply, Said, chat_said, generate_said, head_of

ITEM_BYTES = 64
"""A value of a body takes about so many bytes, the base64 of a picture aside."""


@dataclass(frozen=True, slots=True)
class _Generating:
    """One of the two routes."""

    read: Callable[[Body, int], Translated]
    said: Said
    is_chat: bool


_CHAT = _Generating(of_chat, chat_said, is_chat=True)
_GENERATE = _Generating(of_generate, generate_said, is_chat=False)


def chatting(chat: Handler) -> Handler:
    """The handler of /api/chat. chat: that of OpenAI's."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await _answer(request, _CHAT, {CHAT: chat})

    return handle


def generating(handlers: Mapping[str, Handler]) -> Handler:
    """The handler of /api/generate. handlers: of our routes, by their paths."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await _answer(request, _GENERATE, handlers)

    return handle


async def _answer(
    request: web.Request, kind: _Generating, handlers: Mapping[str, Handler]
) -> web.StreamResponse:
    translated = await _translate(request, kind)
    return (
        translated if isinstance(translated, web.Response) else await handlers[translated](request)
    )


async def _translate(request: web.Request, kind: _Generating) -> str | web.Response:
    """The route of ours that answers, for which the request is made ready; or the whole reply. The body is not
    held any longer than that takes."""
    data = await read_bytes(request)
    asked = await asked_of(request, data)
    model, is_stream, stays_s = asked.model_name(), asked.is_streamed(), asked.keep_alive_s()
    n_ctx = service_of(request).engine.n_ctx  # the request has waited for the model
    if asked.is_empty(is_chat=kind.is_chat):
        if stays_s == 0:
            unload(request)
            return loaded_reply(model, kind.said, "unload")
        keep_alive(request, stays_s)
        return loaded_reply(model, kind.said, "load")
    body = await decode(request, data)
    more = {"model": model, "stream": is_stream}
    path, request[PEEKED] = await by_size(
        len(data) // ITEM_BYTES, _encoded, kind, body, more, n_ctx
    )
    await release(body)
    keep_alive(request, stays_s)
    reads = ChatReader if path == CHAT else TextReader
    reader = reads(has_alternatives=has_alternatives(body))
    request[TRANSLATION] = OllamaReply(path, model, reader, kind.said, request[ARRIVED])
    return path


def _encoded(kind: _Generating, body: Body, more: Body, n_ctx: int) -> tuple[str, bytes]:
    """The route of ours, and the body for it. What is made in between is freed here, off the event loop."""
    path, ours = kind.read(body, n_ctx)
    return path, encode({**ours, **more})


def loaded_reply(model: str, said: Said, reason: str) -> web.Response:
    """The reply to a request that only loads its model, or unloads it."""
    return json_reply(head_of(model) | said(ReplyPart()) | {"done": True, "done_reason": reason})
