"""Vertex AI's predictions: a request of several instances, each for an endpoint of this server.

Every instance is sent to the address that the request came to, with its key, so that it is a request like any
other, whichever engine or model answers it; one that fails fails alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import ClientResponse, hdrs, web

from towerd.api.http.body import decode, read_bytes, release_body
from towerd.api.http.hints import AGENT_HEADER, SESSION_HEADER, WORKFLOW_HEADER
from towerd.api.http.keys import LIMITS
from towerd.api.http.reply import JSON_TYPE, encode, raw_reply
from towerd.api.llama import info
from towerd.engine.llama_server.process.client import Client, ClientFailure, read_all
from towerd.errors import ConfigError, InvalidRequest, TowerdError
from towerd.settings.vertex import Vertex

INSTANCES_MAX = 128
"""As in llama-server."""
FORMAT = "@requestFormat"
"""The field of an instance that names its endpoint."""
_KEPT = (
    *(hdrs.HOST, hdrs.AUTHORIZATION, "X-Api-Key", hdrs.USER_AGENT),
    *(SESSION_HEADER, WORKFLOW_HEADER, AGENT_HEADER),
)
"""Headers of the request that each instance gets."""
Instance: TypeAlias = tuple[str, bytes] | TowerdError
"""The path that an instance is for, and its body; or what is wrong with it."""


def add_routes(app: web.Application, vertex: Vertex) -> None:
    """Register the routes that Vertex AI calls. All other routes are registered before. Raises ConfigError
    if one of them has the path."""
    resources = [resource.canonical for resource in app.router.resources()]
    if vertex.predict in resources:
        raise ConfigError(f"AIP_PREDICT_ROUTE {vertex.predict} is an endpoint of its own.")
    posts = {
        route.resource.canonical
        for route in app.router.routes()
        if route.method == "POST" and route.resource is not None
    }
    endpoints = {path for path in posts if "{" not in path and not path.startswith("/towerd")}
    app.router.add_post(vertex.predict, partial(post_predict, aliases_of(sorted(endpoints))))
    if vertex.health and vertex.health not in resources:
        app.router.add_get(vertex.health, info.get_health)


def aliases_of(paths: Iterable[str]) -> dict[str, str]:
    """Name in `FORMAT` -> path: each path itself, and llama-server's name for it, such as
    chatCompletions for /v1/chat/completions."""
    known = {path: path for path in paths}
    for path in sorted(known, key=lambda path: not path.startswith("/v1/")):
        known.setdefault(_camel_case(path), path)
    return known


def _camel_case(path: str) -> str:
    first, *rest = (
        path.removeprefix("/v1").strip("/").replace("-", "/").replace("_", "/").split("/")
    )
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


async def post_predict(aliases: Mapping[str, str], request: web.Request) -> web.Response:
    """Answer every instance, in order."""
    data = await read_bytes(request)
    body = await decode(request, data)
    if not isinstance(body, dict):
        raise InvalidRequest("request body must be a JSON object")
    listed = body.get("instances")
    if not isinstance(listed, list):
        raise InvalidRequest("request body must include an array field named instances")
    if len(listed) > INSTANCES_MAX:
        raise InvalidRequest(f"instances array exceeds maximum size of {INSTANCES_MAX}")
    is_small = len(data) <= request.app[LIMITS].inline_bytes_max
    read = partial(_read, listed, aliases)
    instances = read() if is_small else await asyncio.to_thread(read)
    del data, body, listed, read
    release_body(request)
    client = _own_client(request)
    try:
        answers = await asyncio.gather(*(_answer(client, request, each) for each in instances))
    finally:
        await client.aclose()
    if sum(map(len, answers)) <= request.app[LIMITS].inline_bytes_max:
        return raw_reply(_joined(answers))
    return raw_reply(await asyncio.to_thread(_joined, answers))


def _joined(answers: list[bytes]) -> bytes:
    return b'{"predictions":[%s]}' % b",".join(answers)


def _read(listed: list[Any], aliases: Mapping[str, str]) -> list[Instance]:
    return [_instance(each, aliases) for each in listed]


def _instance(instance: Any, aliases: Mapping[str, str]) -> Instance:
    if not isinstance(instance, dict):
        return InvalidRequest("each instance must be a JSON object")
    name = instance.pop(FORMAT, None)
    if not isinstance(name, str):
        return InvalidRequest(f"each instance must include a string {FORMAT}")
    if name not in aliases:
        return InvalidRequest(f"no handler registered for {FORMAT}: {name[:200]}")
    if "stream" in instance:
        instance["stream"] = False
    return aliases[name], encode(instance)


def _own_client(request: web.Request) -> Client:
    """A client of the address that the request came to."""
    assert request.transport is not None
    name = request.transport.get_extra_info("sockname")
    if not isinstance(name, tuple):
        return Client("http://localhost", Path(name))
    host = name[0].partition("%")[0]
    return Client(f"http://{f'[{host}]' if ':' in host else host}:{name[1]}")


async def _answer(client: Client, request: web.Request, instance: Instance) -> bytes:
    """The JSON that answers an instance."""
    if isinstance(instance, TowerdError):
        return encode(instance.body())
    path, body = instance
    headers = {name: request.headers[name] for name in _KEPT if name in request.headers}
    headers[hdrs.CONTENT_TYPE] = JSON_TYPE
    try:
        reply = await client.send("POST", path, headers, body)
        try:
            return _as_json(reply, await read_all(reply))
        finally:
            reply.close()
    except ClientFailure:
        return encode(TowerdError("The server did not answer this instance").body())


def _as_json(reply: ClientResponse, body: bytes) -> bytes:
    if reply.content_type == "text/event-stream":
        refused = InvalidRequest("predict route does not support streaming responses")
        return encode(refused.body())
    if not body:
        return b"null"
    return (
        body if reply.content_type == "application/json" else encode(body.decode(errors="replace"))
    )
