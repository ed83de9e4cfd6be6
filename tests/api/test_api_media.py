"""Pictures of conversations over HTTP: replies to HEAD, clients that stop reading, and the RAM of an import."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from store_tools import turn_of
from waiting import until_async

from towerd.api.http import room
from towerd.api.http.limits import Limits
from towerd.app.daemon import build_app
from towerd.models.bundled import bundled_model
from towerd.service import open_service
from towerd.settings.config import Config
from towerd.store.sessions.media import SentMedium, medium_key
from towerd.system.ram_limit import RamLimit

Client = TestClient[web.Request, web.Application]
MIB = 1 << 20
RAM_BYTES = 2 << 30
SEEN = [-(1 << 31), -5, -6]
FILE = b"\x89PNG\r\n\x1a\n" + bytes(20 * MIB)
KEY = medium_key(np.array(SEEN, np.int32))
CHAT = "/towerd/v1/sessions/seen"
PATHS = (f"{CHAT}/export", f"{CHAT}/media/{KEY.hex()}")


class Apparent:
    """What the process seems to take, in bytes."""

    own = 0


@pytest.fixture
def apparent() -> Apparent:
    return Apparent()


@pytest.fixture
async def client(
    tmp_path: Path, apparent: Apparent, aiohttp_client: Callable[..., Awaitable[Client]]
) -> AsyncIterator[Client]:
    """Of a store with a session that has a picture."""
    ram = RamLimit(RAM_BYTES, own=lambda: apparent.own, children=lambda: 0, address_max=0)
    config = Config(model=bundled_model(), store_dir=tmp_path / "s", port=0, ctx_size=512)
    async with open_service(config, ram) as service:
        turn = turn_of([1, 300, *SEEN, 301], [2], session="seen")
        turn = replace(turn, media=[SentMedium(KEY, FILE)])
        await asyncio.to_thread(service.store.commit_turn, turn)
        limits = Limits(write_stall_s=0.5)
        yield await aiohttp_client(build_app(config, service=service, ram=ram, limits=limits))


@pytest.mark.parametrize("path", PATHS)
async def test_a_head_has_no_body(client: Client, path: str) -> None:
    """What follows on the connection is the reply to the next request."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    n_bytes = 0
    try:
        for n, method in enumerate(("HEAD", "GET")):
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            writer.write(head.encode())
            told = await reader.readuntil(b"\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 200 OK\r\n"), (n, told[:99])
            (line,) = (each for each in told.split(b"\r\n") if each.startswith(b"Content-Length"))
            n_bytes = int(line.split()[1])
            assert n_bytes >= len(FILE)
        assert (await reader.readexactly(n_bytes)).endswith(FILE)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_stops_reading_holds_no_ram(client: Client, path: str) -> None:
    """It is cut off, and what was claimed for it is there for others."""
    assert client.app is not None
    ram = client.app[room.RAM]
    before = ram.left()
    _, writer = await asyncio.open_connection(client.host, client.port, limit=4096)
    assert isinstance(writer.transport, asyncio.ReadTransport)
    writer.transport.pause_reading()
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await until_async(lambda: before - ram.left() >= len(FILE))
    await until_async(lambda: ram.left() >= before)
    writer.transport.abort()


async def test_an_import_claims_what_it_takes(
    client: Client, apparent: Apparent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times its pictures, and not what as much text would take."""
    monkeypatch.setattr(room, "WAIT_S", 0.1)
    assert client.app is not None
    ram = client.app[room.RAM]
    file = await (await client.get(f"{CHAT}/export")).read()
    for spare, status in ((70, 200), (30, 503)):
        apparent.own = 0
        apparent.own = ram.left() - spare * MIB
        reply = await client.post("/towerd/v1/sessions/import", data=BytesIO(file))
        assert reply.status == status, await reply.text()
    apparent.own = 0
    reply = await client.post("/towerd/v1/sessions/import?scope=bare&media=0", data=BytesIO(file))
    counts = (await reply.json())["media"]
    assert counts == {"kept": 0, "damaged": 0, "not_kept": 1}
