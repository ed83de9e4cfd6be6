"""Search and titles over HTTP, against reading the text of every conversation."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tenants_talk import KEYS, Client, key
from waiting import until_async

from towerd.app.daemon import build_app
from towerd.models.bundled import bundled_model
from towerd.search.file import FILE_NAME
from towerd.search.index import Passage, SearchIndex, SessionKey
from towerd.service import open_service
from towerd.settings.config import Config

MakeClient = Callable[..., Awaitable[Client]]
ServeApp = Callable[..., Awaitable[Client]]
SESSIONS = "/towerd/v1/sessions"


def config_of(root: Path) -> Config:
    """A small daemon with its store in `root`."""
    return Config(
        model=bundled_model(),
        store_dir=root / "store",
        socket=root / "towerd.sock",
        port=0,
        ctx_size=512,
        live_tokens=2048,
        live_sequences=8,
        parallel=2,
        threads=1,
    )


async def value(reply: Any, status: int = 200) -> Any:
    assert reply.status == status, await reply.text()
    return await reply.json()


async def ask(client: Client, *said: str, **headers: str) -> str:
    """A chat whose user said these, one turn for the last; its session."""
    chat = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": text}
        for i, text in enumerate(said)
    ]
    body = {"messages": chat, "max_tokens": 4, "temperature": 0}
    reply = await client.post("/v1/chat/completions", json=body, headers=headers)
    await value(reply)
    return reply.headers["X-Towerd-Session"]


async def find(client: Client, typed: str, **headers: str) -> list[Any]:
    reply = await client.get("/towerd/v1/search", params={"q": typed}, headers=headers)
    return list((await value(reply))["results"])


async def found(client: Client, typed: str, wanted: set[str], **headers: str) -> None:
    """Wait until the search finds exactly these sessions."""
    ids: set[str] | None = None
    for _ in range(4_000):
        ids = {each["session"]["id"] for each in await find(client, typed, **headers)}
        if ids == wanted:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{typed!r} finds {ids}, not {wanted}")


async def texts(client: Client, **headers: str) -> dict[str, str]:
    """The text of each session."""
    listed = (await value(await client.get(SESSIONS, headers=headers)))["sessions"]
    return {
        each["id"]: (
            await value(await client.get(f"{SESSIONS}/{each['id']}?text=1", headers=headers))
        )["text"]
        for each in listed
    }


async def test_finds_what_is_in_the_texts(client: Client) -> None:
    for said in ("the red otter", "a red fox", "an otter, fox and hare", "nothing"):
        await ask(client, said)
    await ask(client, "the red otter", "Yes.", "and a fox")
    known = await texts(client)
    for word in ("red", "otter", "fox", "hare", "nowhere"):
        wanted = {id for id, text in known.items() if re.search(rf"\b{word}", text)}
        await found(client, word, wanted)


async def test_a_title_is_the_first_question_until_one_is_given(client: Client) -> None:
    """At once, whatever the index has by then."""
    first = "<script>alert(1)</script> Who are\nyou?"
    id = await ask(client, first)
    await ask(client, first, "Me.", "And what else?")
    path = f"{SESSIONS}/{id}"
    (session,) = (await value(await client.get(SESSIONS)))["sessions"]
    assert session["title"] == "<script>alert(1)</script> Who are you?"
    assert (await value(await client.get(path)))["session"]["title"] == session["title"]
    for given, title in (("Mine", "Mine"), ("", session["title"])):
        renamed = await value(await client.patch(path, json={"title": given}))
        assert renamed["session"]["title"] == title


async def test_frozen_and_branched_conversations_are_found(client: Client) -> None:
    """Abandoned branches are part of what was said."""
    id = "two ways"
    named = {"X-Towerd-Session": id}
    await ask(client, "the red otter", "Yes.", "a blue whale", **named)
    await ask(client, "the red otter", "Yes.", "a green snake", **named)
    await found(client, "whale", {id})
    await value(await client.post(f"{SESSIONS}/{id}/freeze", json={}))
    for word in ("otter", "whale", "snake"):
        await found(client, word, {id})


async def test_a_lost_index_is_filled_again(aiohttp_client: ServeApp, tmp_path: Path) -> None:
    """At the next start, from the tokens; what was deleted meanwhile stays away."""
    async with open_service(config_of(tmp_path)) as service:
        client = await aiohttp_client(build_app(service.config, service=service))
        frozen, other = await ask(client, "the red otter"), await ask(client, "a blue otter")
        await value(await client.post(f"{SESSIONS}/{frozen}/freeze", json={}))
        await found(client, "otter", {frozen, other})
        await client.close()
    for path in (tmp_path / "store").glob(FILE_NAME + "*"):
        path.unlink()
    async with open_service(config_of(tmp_path)) as service:
        client = await aiohttp_client(build_app(service.config, service=service))
        await found(client, "otter", {frozen, other})
        listed = (await value(await client.get(SESSIONS)))["sessions"]
        assert {each["title"] for each in listed} == {"the red otter", "a blue otter"}
        await client.close()


async def test_deleted_conversations_leave_at_once(client: Client, tmp_path: Path) -> None:
    id, other = await ask(client, "secretotter"), await ask(client, "an otter")
    await found(client, "secretotter", {id})
    await value(await client.delete(f"{SESSIONS}/{id}"))
    assert await find(client, "secretotter") == []
    await found(client, "otter", {other})

    await until_async(lambda: not holds(tmp_path / "store", b"secretotter"))


def holds(store: Path, word: bytes) -> bool:
    """Whether a word is in the bytes of the index."""
    return any(word in path.read_bytes() for path in store.glob(FILE_NAME + "*"))


async def test_deleted_words_leave_after_a_restart(tmp_path: Path) -> None:
    """A daemon that ended between removing a conversation and overwriting its words left them."""
    async with open_service(config_of(tmp_path)):
        pass
    store = tmp_path / "store"
    index = SearchIndex(store / FILE_NAME)
    gone = SessionKey("00" * 32, "local", "gone")
    index.add(gone, 1.0, [Passage(1, 1.0, "secretotter")])
    index.forget([gone])
    index.close()
    assert holds(store, b"secretotter")
    async with open_service(config_of(tmp_path)):
        await until_async(lambda: not holds(store, b"secretotter"))


async def test_tenants_find_their_own(make_client: MakeClient) -> None:
    client = await make_client(api_keys=KEYS)
    ann = await ask(client, "the red otter", **key("ka"))
    bob = await ask(client, "the blue otter", **key("kb"))
    await found(client, "otter", {ann}, **key("ka"))
    await found(client, "otter", {bob}, **key("kb"))
    reply = await client.get("/towerd/v1/search?q=otter")
    assert reply.status == 401


@pytest.mark.parametrize("typed", ["", '"', "*", "\0", "a" * 1000, "AND", "(", '"" ""', "\ud800"])
async def test_any_words_are_a_query(client: Client, typed: str) -> None:
    await ask(client, "the red otter")
    query = {"q": typed.encode("utf-8", "replace").decode()}
    assert (await value(await client.get("/towerd/v1/search", params=query)))["results"] == []


async def test_bad_queries_are_refused(client: Client) -> None:
    for query in ({"q": "a" * 1001}, {"q": "a", "limit": "0"}, {"q": "a", "limit": "x"}):
        await value(await client.get("/towerd/v1/search", params=query), 400)


async def test_switched_off_it_leaves_nothing(make_client: MakeClient, tmp_path: Path) -> None:
    client = await make_client(search=False)
    await ask(client, "the red otter")
    await value(await client.get("/towerd/v1/search?q=otter"), 400)
    assert not list((tmp_path / "store").glob(FILE_NAME + "*"))
    (session,) = (await value(await client.get(SESSIONS)))["sessions"]
    assert session["title"] == "the red otter"


async def test_a_locked_index_delays_no_chat(client: Client, tmp_path: Path) -> None:
    """Another process writes for long: chats are answered, listed and searched meanwhile."""
    first = await ask(client, "the red otter")
    await found(client, "otter", {first})
    other = sqlite3.connect(tmp_path / "store" / FILE_NAME, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        second = await ask(client, "a blue otter")
        await found(client, "otter", {first})
        listed = (await value(await client.get(SESSIONS)))["sessions"]
        assert {each["title"] for each in listed} == {"the red otter", "a blue otter"}
    finally:
        other.execute("ROLLBACK")
        other.close()
    await found(client, "otter", {first, second})
