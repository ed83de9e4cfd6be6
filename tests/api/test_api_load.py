"""Big bodies and slow clients do not stop the event loop or fill the memory."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.api import bigjson
from towerd.api.limits import Limits

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]

TEN_MB = 10_000_000
TEXT = ('He said "hi" \\ and left.\n\té你😀' * (TEN_MB // 40))[: TEN_MB // 2]
BODIES: dict[str, tuple[str, bytes, int]] = {
    "text": ("/completion", json.dumps({"prompt": TEXT}, ensure_ascii=False).encode(), 400),
    "escaped": ("/completion", json.dumps({"prompt": TEXT}).encode(), 400),
    "ids": ("/completion", json.dumps({"prompt": [7] * (TEN_MB // 3)}).encode(), 400),
    "mixed": ("/completion", json.dumps({"prompt": ["a", *[7] * 300_000]}).encode(), 400),
    "messages": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "x" * 50}] * 50_000}).encode(),
        400,
    ),
    "biases": (
        "/completion",
        json.dumps({"prompt": "a", "logit_bias": [[7, 1.5]] * 131_072}).encode(),
        200,
    ),
    "parts": (
        "/v1/chat/completions",
        json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 65_536}]}
        ).encode(),
        400,
    ),
    "tools": (
        "/v1/chat/completions",
        json.dumps({"messages": [], "tools": [{"a": {"b": [{}] * 20}}] * 4096}).encode(),
        501,
    ),
    "prompts": ("/completion", json.dumps({"prompt": ["a"] * 200_000}).encode(), 400),
    "tokenize": ("/tokenize", json.dumps({"content": "x" * 1_000_000}).encode(), 200),
    "detokenize": ("/detokenize", json.dumps({"tokens": [97] * 1_000_000}).encode(), 200),
}


@pytest.mark.parametrize("name", BODIES)
async def test_ten_megabytes(client: Client, loop_time: Any, name: str) -> None:
    """A 10 MB body is answered, and no step of the loop takes 5 ms for it."""
    path, body, status = BODIES[name]
    url = str(client.make_url(path))

    async def once() -> None:
        # The client runs in a thread: only the server's steps are on the watched loop.
        reply = await asyncio.to_thread(requests.post, url, data=body, timeout=60)
        assert reply.status_code == status, reply.text[:300]

    await loop_time.watch(once)


async def test_long_reply_with_probabilities(client: Client, service: Any, loop_time: Any) -> None:
    """Thousands of alternatives are put together off the loop."""
    service.sessions.reply = "x" * 2000
    body = b'{"prompt": "a", "n_probs": 20}'
    url = str(client.make_url("/completion"))

    def ask() -> int:
        # Read here, too: the watched loop is the server's.
        reply = requests.post(url, data=body, timeout=60)
        return len(reply.json()["completion_probabilities"])

    async def once() -> None:
        assert await asyncio.to_thread(ask) == 2001

    await loop_time.watch(once)


@pytest.mark.parametrize("name", ["text", "escaped", "ids"])
def test_decoder_gets_slices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The C decoder, which keeps the interpreter while it runs, only ever sees a slice."""
    longest = 0
    decode = msgspec.json.decode

    def watched(data: bytes, **kwargs: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(data))
        return decode(data, **kwargs)

    monkeypatch.setattr(msgspec.json, "decode", watched)
    body = BODIES[name][1]
    value = bigjson.decode(body)["prompt"]
    assert longest <= bigjson.SLICE_BYTES + 20
    expected = json.loads(body)["prompt"]
    assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected


async def test_client_that_stops_reading(make_client: MakeClient, service: Any) -> None:
    """It holds a bounded part of its stream, slows nobody, and is cut off in the end."""
    client = await make_client(limits=Limits(write_stall_s=0.5))
    service.sessions.reply = "x" * 100_000
    body = json.dumps({"prompt": "a", "stream": True, "n_probs": 5}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (client.host, client.port))
        await loop.sock_sendall(sock, head.encode() + body)
        await service.sessions.running.wait()
        other = await client.get("/health")
        assert other.status == 200
        async with asyncio.timeout(30):
            await service.sessions.idle.wait()
    assert service.sessions.produced < 100_000
