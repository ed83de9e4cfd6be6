"""Clients that do not read their streams: what is queued for one is bounded, and nothing waits for
it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import ClientSession, web
from served import served
from waiting import until_async

from towerd.api.http.keys import GATE
from towerd.api.http.limits import Limits

MakeApp = Callable[..., Awaitable[web.Application]]
PIECE_BYTES = 4096


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


class Unread:
    """A stream whose client takes as little as the system allows."""

    def __init__(self, url: str, session: str, n_predict: int = 400, n_probs: int = 200) -> None:
        body = {"prompt": "Once", "n_predict": n_predict, "ignore_eos": True, "stream": True}
        data = json.dumps(body | {"n_probs": n_probs, "temperature": 0}).encode()
        self.url, self.session = url, session
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = url.removeprefix("http://").split(":")
        self.sock.connect((host, int(port)))
        self.sock.setblocking(False)
        head = f"POST /completion HTTP/1.1\r\nHost: {host}\r\nX-Towerd-Session: {session}\r\n"
        self.sock.send(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def n_recorded(self, http: ClientSession) -> int:
        """How many tokens its reply had, once it is recorded."""
        async with asyncio.timeout(60):
            while True:
                async with http.get(f"{self.url}/towerd/v1/sessions/{self.session}") as reply:
                    if reply.status == 200 and (turns := (await reply.json())["turns"]):
                        return int(turns[0]["n_reply"])
                await asyncio.sleep(0.01)

    async def rest(self) -> bytes:
        """All that is still to be read; an error of the connection is its end."""
        loop, out = asyncio.get_running_loop(), bytearray()
        try:
            async with asyncio.timeout(30):
                while piece := await loop.sock_recv(self.sock, PIECE_BYTES):
                    out += piece
                    if out.endswith(b"0\r\n\r\n"):
                        break
        except ConnectionError:
            pass
        self.sock.close()
        return bytes(out)


async def serve(
    make_app: MakeApp, stack: AsyncExitStack, **limits: int
) -> tuple[str, ClientSession]:
    url = await stack.enter_async_context(served(await make_app(Limits(**limits))))
    return url, await stack.enter_async_context(ClientSession())


async def test_nobody_waits_for_a_reader(make_app: MakeApp, stack: AsyncExitStack) -> None:
    """A reply that nobody reads is generated and recorded, its slot is free again, and its client
    may still read all of it."""
    url, http = await serve(make_app, stack, backlog_bytes_max=1 << 25, backlogs_bytes_max=1 << 28)
    streams = [Unread(url, f"s{n}") for n in range(2)]
    assert [await each.n_recorded(http) for each in streams] == [400] * len(streams)
    async with http.get(url + "/slots") as reply:
        assert not any(slot["is_processing"] for slot in await reply.json())
    for each in streams:
        assert (await each.rest()).count(b"data: ") == 401


async def test_one_that_falls_behind(make_app: MakeApp, stack: AsyncExitStack) -> None:
    """A client that is too far behind is cut off; what was generated for it is kept."""
    url, http = await serve(make_app, stack, backlog_bytes_max=100_000)
    unread = Unread(url, "slow")
    assert 0 < await unread.n_recorded(http) < 400
    assert not (await unread.rest()).endswith(b"0\r\n\r\n")


async def test_all_that_fall_behind(make_app: MakeApp, stack: AsyncExitStack) -> None:
    """Together they may not take more than a bound: the one that is furthest behind is cut off, and
    those that read are not."""
    app = await make_app(Limits(backlogs_bytes_max=1_000_000))
    url = await stack.enter_async_context(served(app))
    http = await stack.enter_async_context(ClientSession())
    unread = [Unread(url, f"s{n}") for n in range(3)]
    body = {"prompt": "Once", "n_predict": 300, "ignore_eos": True, "stream": True, "n_probs": 200}
    async with http.post(url + "/completion", json=body) as reply:
        assert (await reply.text()).count("data: ") == 301
    for each in unread:
        await each.n_recorded(http)
    ends = [(await each.rest()).endswith(b"0\r\n\r\n") for each in unread]
    assert not all(ends)
    service = app[GATE].open()
    await until_async(lambda: not any(slot.is_processing for slot in service.engine.slots()))
