"""Big bodies and slow clients do not stop the event loop or fill the memory."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.api.http.limits import Limits

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
        json.dumps({"messages": [{"role": "user", "content": "x" * 5000}] * 2000}).encode(),
        400,
    ),
    "biases": (
        "/completion",
        json.dumps({"prompt": "a", "n_predict": 3, "logit_bias": [[7, 1.5]] * 131_072}).encode(),
        200,
    ),
    "tools": (
        "/v1/chat/completions",
        json.dumps({"messages": [], "tools": [{"a": {"b": [{}] * 20}}] * 4096}).encode(),
        400,
    ),
    "blocks": (
        "/v1/messages",
        json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 65_536}]}
        ).encode(),
        400,
    ),
    "ollama": (
        "/api/chat",
        json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "x" * 500}] * 20_000}
        ).encode(),
        400,
    ),
    "pictures": (
        "/api/chat",
        json.dumps(
            {"model": "m", "messages": [{"role": "user", "images": ["iVBORw0K" * (TEN_MB // 8)]}]}
        ).encode(),
        400,
    ),
    "template": (
        "/apply-template",
        json.dumps({"messages": [{"role": "user", "content": TEXT}]}).encode(),
        200,
    ),
    "counted": (
        "/v1/messages/count_tokens",
        json.dumps({"messages": [{"role": "user", "content": "x " * 500_000}]}).encode(),
        200,
    ),
    "nothing": ("/v1/responses", b" " * TEN_MB, 400),
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


@pytest.mark.parametrize("stream", [False, True])
async def test_long_reply_with_probabilities(client: Client, loop_time: Any, stream: bool) -> None:
    """Thousands of alternatives are put together off the loop."""
    fields: Any = {
        "prompt": "a",
        "n_probs": 100,
        "n_predict": 400,
        "ignore_eos": True,
        "stream": stream,
    }
    url = str(client.make_url("/completion"))

    def ask() -> int:
        # Read here, too: the watched loop is the server's.
        return requests.post(url, json=fields, timeout=60).text.count('"top_logprobs"')

    async def once() -> None:
        assert await asyncio.to_thread(ask) == 400

    await loop_time.watch(once)


async def test_many_streams(client: Client, loop_time: Any) -> None:
    """Each token of each stream is a small step."""
    fields: Any = {"prompt": "Once", "n_predict": 100, "ignore_eos": True, "stream": True}
    url = str(client.make_url("/completion"))

    def ask() -> bool:
        return '"stop":true' in requests.post(url, json=fields, timeout=60).text

    async def once() -> None:
        loop = asyncio.get_running_loop()
        # Threads of their own: the daemon stores the turns in the loop's.
        with ThreadPoolExecutor(8) as clients:
            asked = [loop.run_in_executor(clients, ask) for _ in range(8)]
            assert all(await asyncio.gather(*asked))

    await loop_time.watch(once)


async def test_client_that_stops_reading(make_client: MakeClient) -> None:
    """It holds a bounded part of its stream, slows no other client, and is cut off in the end."""
    client = await make_client(
        limits=Limits(write_stall_s=0.5), ctx_size=8192, live_tokens=16384, parallel=2
    )
    fields = {"prompt": "a", "stream": True, "n_probs": 500, "n_predict": 8000, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (client.host, client.port))
        await loop.sock_sendall(sock, head.encode() + body)
        while not (await slots(client))[0]["is_processing"]:
            pass
        async with client.post("/completion", json={"prompt": "b", "n_predict": 1}) as other:
            assert other.status == 200
        async with asyncio.timeout(30):
            while (await slots(client))[0]["is_processing"]:
                pass
    listed = await (await client.get("/towerd/v1/sessions")).json()
    assert 10 < max(each["n_tokens"] for each in listed["sessions"]) < 8000


async def slots(client: Client) -> Any:
    return await (await client.get("/slots")).json()
