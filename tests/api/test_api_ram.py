"""A limit on RAM as clients see it: a refusal in each API's own shape, until there is room again."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, make_mocked_request

from lab.models.vision import make_projector, picture
from towerd.api.http import room
from towerd.api.http.body import BODIES, Bodies, release_body
from towerd.api.http.room import bytes_to_parse
from towerd.app.daemon import build_app
from towerd.models.bundled import bundled_model
from towerd.service import open_service
from towerd.settings.config import Config
from towerd.system.ram_limit import RamLimit

Client = TestClient[web.Request, web.Application]
GIB = 1 << 30
MIB = 1 << 20
USER = {
    "model": "story",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 2,
}
TYPES = {
    "/completion": "unavailable_error",
    "/v1/chat/completions": "unavailable_error",
    "/v1/messages": "overloaded_error",
    "/api/chat": None,
}
"""Path -> the type of the error; Ollama's have none."""


class Seeming:
    """What the process seems to take, in bytes."""

    own = 0


@pytest.fixture
def seeming() -> Seeming:
    return Seeming()


@pytest.fixture
async def client(
    tmp_path: Path, seeming: Seeming, aiohttp_client: Callable[..., Awaitable[Client]]
) -> AsyncIterator[Client]:
    ram = RamLimit(2 * GIB, own=lambda: seeming.own, children=lambda: 0, address_max=0)
    config = Config(
        model=bundled_model(), alias="story", store_dir=tmp_path / "s", port=0, ctx_size=512
    )
    async with open_service(config, ram) as service:
        yield await aiohttp_client(build_app(config, service=service, ram=ram))


def asked(path: str) -> dict[str, Any]:
    return {"prompt": "Once", "n_predict": 2} if path == "/completion" else USER


@pytest.mark.parametrize("path", TYPES)
async def test_refused_in_its_shape(
    client: Client, seeming: Seeming, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(room, "WAIT_S", 0.1)
    seeming.own = 2 * GIB
    async with client.post(path, json=asked(path)) as reply:
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) > 0
        error = (await reply.json())["error"]
    said = error if isinstance(error, str) else error["message"]
    assert "--ram-max 2,048 MiB" in said
    assert TYPES[path] is None or error["type"] == TYPES[path]
    async with client.get("/health") as reply:
        assert reply.status == 200
    async with client.get("/towerd/v1/stats") as reply:
        assert (await reply.json())["ram"]["ram_refusals"] == 1
    async with client.get("/metrics") as reply:
        assert "towerd_ram_bytes_max 2.147483648e+09" in await reply.text()
    seeming.own = 0
    async with client.post(path, json=asked(path)) as reply:
        assert reply.status == 200, await reply.text()


async def test_a_request_waits_for_room(client: Client, seeming: Seeming) -> None:
    """It is not refused where others leave in time."""
    seeming.own = 2 * GIB
    asking = asyncio.create_task(client.post("/completion", json=asked("/completion")))
    await asyncio.wait((asking,), timeout=0.5)
    assert not asking.done()
    seeming.own = 0
    assert (await asking).status == 200


async def test_replies_with_probabilities_at_once(
    client: Client, seeming: Seeming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each claims 6 MiB until it is sent; the 24 MiB that it takes while it is written are there once for all."""
    monkeypatch.setattr(room, "WAIT_S", 0.01)
    assert client.app is not None
    ram = client.app[room.RAM]
    seeming.own = ram.left() - 80 * MIB
    body = {"prompt": "Once", "n_predict": 100, "ignore_eos": True, "n_probs": 200}
    asking = [client.post("/completion", json=body) for _ in range(5)]
    replies = await asyncio.gather(*asking)
    assert [each.status for each in replies] == [200] * 5, [
        await each.text() for each in replies if each.status != 200
    ]
    for each in replies:
        assert len((await each.json())["completion_probabilities"]) == 100
    assert ram.left() == 80 * MIB, "all that was claimed is released"
    seeming.own += 60 * MIB
    async with client.post("/completion", json=body) as reply:
        assert reply.status == 503


@pytest.mark.parametrize("stays", [True, False])
async def test_the_copy_of_a_picture_is_claimed(
    tmp_path: Path,
    seeming: Seeming,
    aiohttp_client: Callable[..., Awaitable[Client]],
    stays: bool,
) -> None:
    """That the store gets at the end, until then; not where it gets none."""
    projector = tmp_path / "mmproj.gguf"
    make_projector(projector, 64)
    ram = RamLimit(2 * GIB, own=lambda: seeming.own, children=lambda: 0, address_max=0)
    config = Config(
        model=bundled_model(),
        store_dir=tmp_path / "s",
        port=0,
        ctx_size=1024,
        keep_media=stays,
        llama_server_args=("--mmproj", str(projector), "--no-warmup"),
    )
    file = base64.b64decode(picture(1)) + bytes(8 * MIB)
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": parts}], "stream": True, "max_tokens": 300}
    data = BytesIO(json.dumps(body | {"ignore_eos": True}).encode())
    async with open_service(config, ram) as service:
        client = await aiohttp_client(build_app(config, service=service, ram=ram))
        before = ram.left()
        async with client.post("/v1/chat/completions", data=data) as reply:
            assert (await reply.content.readline()).startswith(b"data: ")
            claimed = before - ram.left()
            rest = await reply.text()
            assert "[DONE]" in rest, rest
        assert claimed // MIB == (8 if stays else 0)
        assert before - ram.left() < MIB, "all that was claimed is released"


async def test_what_a_reply_has_is_not_counted_twice(seeming: Seeming) -> None:
    """As it comes the claim becomes less; at its end nothing of it is left."""
    ram = RamLimit(100 * MIB, own=lambda: seeming.own, children=lambda: 0, address_max=0)
    app = web.Application()
    bodies = app[BODIES] = Bodies(MIB, ram)
    one, other = (make_mocked_request("POST", "/", app=app) for _ in range(2))
    await bodies.claim_reply(one, 40 * MIB, 20 * MIB)
    assert ram.left() == 37 * MIB
    for _ in range(6):
        seeming.own += 5 * MIB
        bodies.reply_arrived(one, 5 * MIB)
        assert ram.left() == 37 * MIB
    await bodies.claim_reply(other, 10 * MIB, 15 * MIB)
    assert ram.left() == 27 * MIB
    await bodies.claim_reply(other, 10 * MIB, 30 * MIB)  # it is longer than was thought
    assert ram.left() == 7 * MIB
    async with bodies.writing_reply(one):
        seeming.own -= 20 * MIB
    bodies.reply_written(one)
    bodies.reply_arrived(one, 90 * MIB)  # no more than was claimed
    assert ram.left() == 37 * MIB
    release_body(one)
    release_body(other)
    assert ram.left() == 87 * MIB


async def test_replies_are_written_one_after_the_other(seeming: Seeming) -> None:
    """Those that have claimed room for it."""
    ram = RamLimit(100 * MIB, own=lambda: seeming.own, children=lambda: 0, address_max=0)
    app = web.Application()
    bodies = app[BODIES] = Bodies(MIB, ram)
    large = [make_mocked_request("POST", "/", app=app) for _ in range(3)]
    n_writing = 0

    async def write(request: web.Request) -> None:
        nonlocal n_writing
        async with bodies.writing_reply(request):
            n_writing += 1
            assert n_writing == 1
            async with bodies.writing_reply(make_mocked_request("POST", "/", app=app)):
                await asyncio.sleep(0)  # a small one waits for none
            n_writing -= 1

    for each in large:
        await bodies.claim_reply(each, MIB, 40 * MIB)
    await asyncio.gather(*map(write, large))


async def test_without_a_limit_none_waits_for_another() -> None:
    """Two large replies are written at once."""
    app = web.Application()
    bodies = app[BODIES] = Bodies(MIB, RamLimit(address_max=0))
    both = asyncio.Barrier(2)

    async def write() -> None:
        request = make_mocked_request("POST", "/", app=app)
        await bodies.claim_reply(request, 10 * MIB, 40 * MIB)
        async with bodies.writing_reply(request):
            await both.wait()

    async with asyncio.timeout(30):
        await asyncio.gather(write(), write())


def test_what_parsing_takes() -> None:
    """Texts, numbers and pictures are known from each other."""
    text, numbers = b'{"prompt": "' + b"a" * MIB + b'"}', b"[" + b"1," * (MIB // 2) + b"1]"
    picture = b'{"url": "data:image/png;base64,' + b"A" * MIB + b'"}'
    room_bytes = 800 * MIB
    assert bytes_to_parse(b"x" * 1000, room_bytes) < 64 * 1024
    assert 40 * MIB < bytes_to_parse(text, room_bytes) < 50 * MIB
    assert 32 * MIB < bytes_to_parse(numbers, room_bytes) < 40 * MIB
    assert 400 * MIB <= bytes_to_parse(picture, room_bytes) < 410 * MIB
    assert bytes_to_parse(text, 64 * MIB) < bytes_to_parse(text, room_bytes)
