"""A conversation that is deleted while something is on its way into it stays deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tenants_talk import Client
from waiting import until_async

SESSIONS = "/towerd/v1/sessions"
SAID = "xylophone secretotter quartz"
Delete = Callable[[], Awaitable[None]]


async def value(reply: Any, status: int = 200) -> Any:
    assert reply.status == status, await reply.text()
    return await reply.json()


async def listed(client: Client) -> list[str]:
    return [each["id"] for each in (await value(await client.get(SESSIONS)))["sessions"]]


async def n_tokens(client: Client) -> int:
    """Tokens that the store knows of any conversation."""
    stats = (await value(await client.get("/towerd/v1/stats")))["store"]
    return int(stats["tokens"])


async def ask(client: Client, headers: dict[str, str], *, n: int, on_first: Delete) -> None:
    """A chat request whose answer is read to its end; `on_first` runs once it has begun."""
    body = {"messages": [{"role": "user", "content": SAID}], "max_tokens": n, "stream": True}
    async with client.post("/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200
        assert await reply.content.readline()
        await on_first()
        assert b"[DONE]" in await reply.read()


@pytest.mark.parametrize("headers", [{}, {"X-Towerd-Session": "gone"}], ids=["found", "named"])
async def test_an_answer_on_its_way(
    client: Client, tmp_path: Path, headers: dict[str, str]
) -> None:
    """The same question is being answered again when its conversation is deleted: the client has its
    answer, and nobody has the conversation: no list, no search, and after a gc no file."""

    async def nothing() -> None:
        pass

    async def delete() -> None:
        for id in await listed(client):
            await value(await client.delete(f"{SESSIONS}/{id}"))

    await ask(client, headers, n=8, on_first=nothing)
    await until_async(lambda: holds(tmp_path / "store", b"secretotter"))
    await ask(client, headers, n=300, on_first=delete)
    assert await listed(client) == []
    await value(await client.post("/towerd/v1/gc", json={}))
    while await n_tokens(client):  # what was evaluated ahead is known a moment after an answer
        await value(await client.post("/towerd/v1/gc", json={}))
    await until_async(lambda: not holds(tmp_path / "store", b"secretotter"))
    found = await value(await client.get("/towerd/v1/search", params={"q": "secretotter"}))
    assert found["results"] == []


async def test_an_import_on_its_way(client: Client) -> None:
    """Imports wait for each other; one that waited while its conversation was deleted says so."""

    async def nothing() -> None:
        pass

    await ask(client, {"X-Towerd-Session": "gone"}, n=8, on_first=nothing)
    exported = await client.get(f"{SESSIONS}/gone/export")
    data = await exported.read()
    arrived, may_go_on = asyncio.Event(), asyncio.Event()

    async def body() -> Any:
        yield data[:10]
        arrived.set()
        await may_go_on.wait()
        yield data[10:]

    importing = asyncio.create_task(client.post("/towerd/v1/sessions/import", data=body()))
    await arrived.wait()
    await value(await client.get(SESSIONS))  # the server has read what came before this
    await value(await client.delete(f"{SESSIONS}/gone"))
    may_go_on.set()
    refused = await value(await importing, 409)
    assert "deleted" in refused["error"]["message"]
    assert await listed(client) == []
    await value(await client.post("/towerd/v1/sessions/import", data=data))
    assert await listed(client) == ["gone"]


def holds(store: Path, word: bytes) -> bool:
    """Whether a word is in the bytes of a file."""
    return any(word in path.read_bytes() for path in store.rglob("*") if path.is_file())
