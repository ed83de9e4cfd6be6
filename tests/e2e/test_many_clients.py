"""Hundreds of clients at once, many that leave, and some that send or read nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import psutil
import pytest
from daemon import Daemon
from waiting import until, until_async

MakeDaemon = Callable[..., Daemon]

N_CONNECTIONS = 300
N_SILENT = 60
N_POOLED = 30
"""Threads that the daemon's pools may yet start, together."""


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> Iterator[Daemon]:
    """A daemon of this test's own, whose store has to be sound afterwards."""
    made = make_daemon()
    with made:
        yield made
        assert made.stop() == 0, made.log
    assert "Traceback" not in made.log
    with made.stored():
        pass


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without a limit on its connections."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as made:
        yield made


def head(host: str, path: str, n_bytes: int, more: str = "") -> bytes:
    """The head of a POST."""
    lines = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {n_bytes}\r\n{more}\r\n"
    return lines.encode()


def prompt(seed: int) -> list[int]:
    """Token ids that few other prompts begin with."""
    chance = random.Random(seed)
    return [1, *(chance.randrange(300, 500) for _ in range(chance.randrange(4, 40)))]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n_cancelled", [120, pytest.param(1000, marks=pytest.mark.soak)])
async def test_cancelled_streams(
    daemon: Daemon, http: aiohttp.ClientSession, n_cancelled: int
) -> None:
    """Clients leave before, at and after the first token: nothing keeps running, no descriptor
    and no slot is lost, and the daemon answers as before."""
    process = psutil.Process(daemon.pid)

    async def leave(seed: int) -> None:
        body = {"prompt": prompt(seed), "n_predict": 64, "ignore_eos": True, "stream": True}
        async with http.post(daemon.url + "/completion", json=body) as reply:
            if reply.status == 503:  # the queue is full
                return
            assert reply.status == 200, await reply.text()
            for _ in range(seed % 4):
                await reply.content.readline()
            reply.close()

    async def client(seeds: range) -> None:
        for seed in seeds:
            await leave(seed)

    expected = (await asyncio.to_thread(daemon.complete, prompt(-1)))["tokens"]
    await asyncio.gather(*(client(range(n, 40, 20)) for n in range(20)))
    await until_async(lambda: daemon.n_processing() == 0)
    n_fds, n_threads = process.num_fds(), process.num_threads()
    await asyncio.gather(*(client(range(40 + n, n_cancelled, 20)) for n in range(20)))
    await until_async(lambda: daemon.n_processing() == 0)
    await until_async(lambda: process.num_fds() <= n_fds + 4)
    await until_async(lambda: process.num_threads() <= n_threads + N_POOLED)
    assert (await asyncio.to_thread(daemon.complete, prompt(-1)))["tokens"] == expected


@pytest.mark.timeout(300)
async def test_three_hundred_connections_at_once(
    daemon: Daemon, http: aiohttp.ClientSession
) -> None:
    """Each gets a reply: the right one, or the error that says the queue is full."""

    async def ask(n: int) -> int:
        body = {
            "prompt": prompt(n % 10),
            "n_predict": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            "stream": n % 2 == 0,
        }
        async with http.post(daemon.url + "/completion", json=body) as reply:
            text = await reply.text()
        if reply.status == 503:
            assert json.loads(text)["error"]["type"] == "unavailable_error"
            return 0
        assert reply.status == 200, text
        replies = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")] or [text]
        tokens = [token for each in replies for token in json.loads(each)["tokens"]]
        assert tokens == expected[n % 10]
        return 1

    expected = [
        (await asyncio.to_thread(daemon.complete, prompt(seed)))["tokens"] for seed in range(10)
    ]
    answered = await asyncio.gather(*(ask(n) for n in range(N_CONNECTIONS)))
    assert sum(answered) >= 256, "the queue holds that many"
    await until_async(lambda: daemon.n_processing() == 0)


def test_clients_that_send_or_read_nothing(daemon: Daemon) -> None:
    """Connections without a request, with half a header, with a header a byte at a time, and
    with a reply that is not read: all others are answered, and they cost a descriptor each."""
    host, port = daemon.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "Once", "n_predict": 120, "ignore_eos": True, "stream": True})
    requests: list[bytes] = [
        b"",
        b"POST /completion HTTP/1.1\r\nHo",
        f"GET /health HTTP/1.1\r\nHost: {host}\r\nX-Slow: ".encode(),
        head(host, "/completion", len(body)) + body.encode(),
    ]
    process = psutil.Process(daemon.pid)
    daemon.complete("Before", 1)
    n_fds = process.num_fds()
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(N_SILENT)
        ]
        for n, each in enumerate(silent):
            each.sendall(requests[n % len(requests)])
        for _ in range(20):
            for each in silent[2 :: len(requests)]:
                each.sendall(b"x")
            assert daemon.complete("Others are answered", 4)["tokens_predicted"] == 4
        assert daemon.get("/health") == {"status": "ok"}
        assert process.num_fds() <= n_fds + N_SILENT + 4
    until(lambda: daemon.n_processing() == 0)
    until(lambda: process.num_fds() <= n_fds + 4)


def test_a_reply_to_a_slow_header(daemon: Daemon) -> None:
    """A request that arrives a byte at a time is answered like any other."""
    host, port = daemon.url.removeprefix("http://").split(":")
    data = b'{"content": "a girl"}'
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        for byte in head(host, "/tokenize", len(data), "Connection: close\r\n") + data:
            sock.sendall(bytes((byte,)))
        reply = b""
        while part := sock.recv(4096):
            reply += part
    assert reply.startswith(b"HTTP/1.1 200 ")
    found: dict[str, Any] = json.loads(reply.split(b"\r\n\r\n", 1)[1])
    assert found == daemon.post("/tokenize", {"content": "a girl"})
