"""Requests with too many of anything: refused by name, before anything runs. What towerd.wire bounds by
itself is tested in tests/wire."""

from __future__ import annotations

import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient
from services import EmbeddedService

from towerd.api.http.limits import Limits

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]

MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
BASE = "/towerd/v1/precache"
TOO_MANY: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/completion", {"prompt": ["a"] * 1025}, "prompt"),
    ("/completion", {"prompt": "a", "stop": ["x"] * 1025}, "'stop'"),
    ("/completion", {"prompt": "a", "samplers": "k" * 65}, "'samplers'"),
    ("/completion", {"prompt": "a", "unknown": [[]] * 4_000_001}, "4000000 values"),
    (
        "/v1/chat/completions",
        {"messages": [MESSAGE], "unknown": [[]] * 4_000_001},
        "4000000 values",
    ),
    ("/tokenize", {"content": ["a"] * 2_000_002}, "2000000 values"),
    (BASE, {"name": "b", "messages": [MESSAGE] * 65_537}, "'messages'"),
    (
        BASE,
        {"name": "b", "messages": [{**MESSAGE, "content": [PART] * 17}] * 4000},
        "65536 content parts",
    ),
    (BASE, {"name": "b", "messages": [MESSAGE], "tools": [{}] * 4097}, "'tools'"),
)


def sent(body: Any) -> io.BytesIO:
    """A body that a client may be sending for a while."""
    return io.BytesIO(json.dumps(body).encode())


async def test_too_many(client: Client, service: EmbeddedService) -> None:
    """The error names the field that exceeds its limit, and the limit."""
    for path, body, words in TOO_MANY:
        async with client.post(path, data=sent(body)) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["type"]) == (400, "invalid_request_error"), error
        assert words in error["message"]
    assert service.engine.stats()["tasks"] == 0


async def test_as_many_as_allowed(client: Client, service: EmbeddedService) -> None:
    """Fields at their limit are accepted."""
    body = {
        "prompt": "a",
        "n_predict": 1,
        "stop": ["x"] * 1024,
        "samplers": "k" * 64,
        "response_fields": ["stop"] * 64,
        "logit_bias": [[7, 1.5]] * 131_072,
        "dry_sequence_breakers": ["x"] * 64,
    }
    async with client.post("/completion", data=sent(body)) as reply:
        assert await reply.json() == {"stop": True}
    assert service.engine.stats()["tasks"] == 1


async def test_limits_can_be_set(make_client: MakeClient) -> None:
    """They are those of the application."""
    client = await make_client(limits=Limits(messages_max=2))
    body = {"name": "b", "messages": [MESSAGE] * 3}
    async with client.post(BASE, json=body) as reply:
        error = (await reply.json())["error"]
    assert error["message"] == "Field 'messages': at most 2 entries are allowed, but it has 3"
