"""Sockets that speak no HTTP, too slowly, too much or never: others are answered, and nothing is kept."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import requests
from daemon import Daemon
from waiting import until

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.engine.llama_server.process.binary import find_binary
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model

HEALTH_S_MAX = 5.0
"""On a machine with other work; within which /health answers, whoever else is connected."""
RSS_MB_MAX = 64
"""What a round may leave behind, after the first ones."""
HOLD_S = 0.5
Attack = Callable[[str, int, random.Random], Coroutine[None, None, None]]
STREAM = json.dumps(
    {"prompt": "Once", "n_predict": 200, "ignore_eos": True, "stream": True}
).encode()


async def talk(
    host: str, port: int, data: bytes, hold_s: float = 0.0, pause_s: float = 0.0
) -> None:
    """Send bytes, one by one with pauses if told so, then hold the connection and reset it."""
    reader, writer = await asyncio.open_connection(host, port)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with suppress(ConnectionError):
        if pause_s:
            for byte in data:
                writer.write(bytes((byte,)))
                await writer.drain()
                await asyncio.sleep(pause_s)
        else:
            writer.write(data)
            await writer.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                while await reader.read(4096):
                    pass
    writer.transport.abort()


def post(path: str, body: bytes, *more: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", *more)
    if not any("transfer-encoding" in each.lower() for each in more):
        lines += (f"Content-Length: {len(body)}",)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def garbage(host: str, port: int, chance: random.Random) -> None:
    await talk(host, port, chance.randbytes(chance.choice((1, 100, 70_000))), HOLD_S)


async def tls_hello(host: str, port: int, chance: random.Random) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(505)
    await talk(host, port, hello, HOLD_S)


async def half_request(host: str, port: int, chance: random.Random) -> None:
    whole = post("/completion", STREAM)
    await talk(host, port, whole[: chance.randrange(len(whole))], HOLD_S)


async def slow_bytes(host: str, port: int, chance: random.Random) -> None:
    await talk(host, port, post("/completion", STREAM)[:60], pause_s=0.02)


async def pipelined(host: str, port: int, chance: random.Random) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await talk(host, port, one * chance.choice((2, 100, 3000)), HOLD_S)


async def pipelined_streams(host: str, port: int, chance: random.Random) -> None:
    await talk(host, port, post("/completion", STREAM) * 20, HOLD_S)


async def huge_header(host: str, port: int, chance: random.Random) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    kind = chance.choice(("one", "many", "line"))
    if kind == "one":
        head += b"X-Long: " + b"a" * 2_000_000 + b"\r\n"
    elif kind == "many":
        head += b"".join(b"X-%d: a\r\n" % n for n in range(50_000))
    else:
        head = b"GET /" + b"a" * 2_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n"
    await talk(host, port, head + b"\r\n", HOLD_S)


async def absurd_chunks(host: str, port: int, chance: random.Random) -> None:
    sizes = (
        b"ffffffffffffffff",
        b"7fffffffffffffff",
        b"-1",
        b"0x10",
        b"1" * 5000,
        b"",
        b"zz",
        b"10;" + b"a" * 99_999,
    )
    body = chance.choice(sizes) + b"\r\n" + b"{" * 16
    await talk(host, port, post("/completion", body, "Transfer-Encoding: chunked"), HOLD_S)


async def absurd_lengths(host: str, port: int, chance: random.Random) -> None:
    length = chance.choice(
        ("99999999999999999999", "-1", "1e9", "67000000", "5\r\nContent-Length: 7")
    )
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    await talk(host, port, head.encode() + b"{}", HOLD_S)


async def websocket(host: str, port: int, chance: random.Random) -> None:
    head = "GET /completion HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    await talk(host, port, head.encode() + chance.randbytes(200), HOLD_S)


async def smuggled(host: str, port: int, chance: random.Random) -> None:
    inner = b"0\r\n\r\nDELETE /towerd/v1/sessions/mine HTTP/1.1\r\nHost: localhost\r\n\r\n"
    both = ("Transfer-Encoding: chunked", f"Content-Length: {len(inner)}")
    await talk(host, port, post("/completion", inner, *both), HOLD_S)


async def reset_in_a_stream(host: str, port: int, chance: random.Random) -> None:
    await talk(host, port, post("/completion", STREAM), chance.uniform(0, HOLD_S))


async def connect_only(host: str, port: int, chance: random.Random) -> None:
    await talk(host, port, b"", 2 * HOLD_S)


ATTACKS: tuple[Attack, ...] = (
    *(garbage, tls_hello, half_request, slow_bytes, pipelined, pipelined_streams, huge_header),
    *(absurd_chunks, absurd_lengths, websocket, smuggled, reset_in_a_stream, connect_only),
)


async def attack_once(daemon: Daemon, chance: random.Random, n_each: int) -> float:
    """All attacks at once, so many of each; the longest that /health took meanwhile."""
    host, port = daemon.url.removeprefix("http://").split(":")
    attackers: list[asyncio.Task[None]] = [
        asyncio.create_task(each(host, int(port), chance)) for each in ATTACKS * n_each
    ]
    slowest = 0.0
    pending: set[asyncio.Task[None]] = set(attackers)
    while pending:
        began = time.monotonic()
        reply = await asyncio.to_thread(requests.get, daemon.url + "/health", timeout=60)
        assert reply.status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        _, pending = await asyncio.wait(attackers, timeout=0.1)
    for each in attackers:
        with suppress(ConnectionError):
            each.result()
    return slowest


def processes(daemon: Daemon) -> list[psutil.Process]:
    own = psutil.Process(daemon.pid)
    return [own, *own.children(recursive=True)]


def n_fds(daemon: Daemon) -> int:
    return sum(each.num_fds() for each in processes(daemon))


def rss_mb(daemon: Daemon) -> float:
    return sum(each.memory_info().rss for each in processes(daemon)) / 2**20


@pytest.fixture(params=["embedded", "llama-server", "router"])
def attacked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of each kind, with a session named `mine`."""
    flags: tuple[str, ...] = ("-c", "1024", "-np", "2", "--hot-bytes", "16MiB")
    if request.param == "llama-server":
        try:
            find_binary()
        except ConfigError as error:
            pytest.skip(error.message)
        flags += ("--engine", "llama-server")
    if request.param == "router":
        folder = tmp_path / "m"
        folder.mkdir()
        (folder / "tales.gguf").write_bytes(bundled_model().read_bytes())
        make_random_gguf(folder / "dice.gguf", PRESETS["tiny"])
        flags += ("--models-dir", str(folder), "--no-models-autoload")
    with Daemon(tmp_path / "d", *flags) as daemon:
        if request.param == "router":
            daemon.post("/models/load", {"model": "tales"})
            until(lambda: daemon.get("/models")["data"][1]["status"]["value"] == "loaded")
        say(daemon, "mine")
        yield daemon
        say(daemon, "mine")
        assert daemon.get("/towerd/v1/sessions/mine")["session"]["id"] == "mine"
        assert daemon.stop() == 0, daemon.log
        assert "Traceback" not in daemon.log


def say(daemon: Daemon, session: str) -> None:
    body = {"prompt": "Once upon", "n_predict": 4, "ignore_eos": True}
    daemon.post("/completion", body, headers={"X-Towerd-Session": session})


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("n_rounds", "n_each"), [(3, 2), pytest.param(30, 20, marks=pytest.mark.soak, id="soak")]
)
async def test_hostile_sockets(attacked: Daemon, n_rounds: int, n_each: int) -> None:
    """Whatever arrives, /health answers, no descriptor is kept and memory stays."""
    chance = random.Random(n_rounds)
    slowest, settled = 0.0, 0.0
    n_before = n_fds(attacked)
    for n in range(n_rounds):
        slowest = max(slowest, await attack_once(attacked, chance, n_each))
        if n == n_rounds // 3:
            settled = rss_mb(attacked)
    await asyncio.to_thread(until, lambda: n_fds(attacked) <= n_before + 8)
    print(f"/health took at most {slowest:.2f} s; {settled:.0f} MB, then {rss_mb(attacked):.0f}")
    assert slowest < HEALTH_S_MAX
    assert rss_mb(attacked) < settled + RSS_MB_MAX


async def test_what_is_refused_is_not_kept(attacked: Daemon) -> None:
    """Request lines of two megabytes leave nothing behind, long before a full collection is due."""
    host, port = attacked.url.removeprefix("http://").split(":")
    line = b"GET /" + b"a" * 2_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = rss_mb(attacked)
    for _ in range(6):
        await asyncio.gather(*(talk(host, int(port), line, HOLD_S) for _ in range(20)))
    assert rss_mb(attacked) < before + RSS_MB_MAX


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [200, pytest.param(3000, marks=pytest.mark.soak, id="soak")])
async def test_idle_connections(attacked: Daemon, n: int) -> None:
    """As many as the system allows are held; others are answered, and all of it is given back."""
    host, port = attacked.url.removeprefix("http://").split(":")
    n_before = n_fds(attacked)
    held = [await asyncio.open_connection(host, int(port)) for _ in range(n)]
    for _, writer in held[::2]:
        writer.write(b"GET /health HTTP/1.1\r\nHost: lo")
    began = time.monotonic()
    await asyncio.to_thread(say, attacked, "mine")
    assert time.monotonic() - began < HEALTH_S_MAX
    for _, writer in held:
        writer.transport.abort()
    await asyncio.to_thread(until, lambda: n_fds(attacked) <= n_before + 8)
