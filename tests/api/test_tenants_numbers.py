"""The numbers that a tenant sees count nothing of what others do, and can be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tenants_talk import KEYS, Client, key

from towerd.api.http.keys import GATE
from towerd.api.http.numbers import Numbers
from towerd.api.relay.relay import SlotHider

MakeClient = Callable[..., Awaitable[Client]]
OWN = "/towerd/v1"
NAMES = ("id", "parent", "path", "children", "leaf", "prompt_node", "reply_node", "segment", "root")


def numbers_in(value: Any, name: str = "") -> Iterator[int]:
    """Every number of a segment, a turn or a session in a reply, but 0, the root's."""
    if isinstance(value, dict):
        for at, each in value.items():
            if at != "children" or isinstance(each, list):  # else it is their count
                yield from numbers_in(each, at)
    elif isinstance(value, list):
        for each in value:
            yield from numbers_in(each, name)
    elif name in NAMES and isinstance(value, int) and value:
        yield value


@pytest.mark.parametrize("number", [1, 2, 3, 1000, 2**26 - 1, 2**26, 2**40 + 7, 2**52 - 1])
def test_numbers_are_one_for_one(number: int) -> None:
    """Each tenant's are its own, and fit a number of JSON exactly."""
    ann, bob = Numbers.of_tenant(b"secret", "ann"), Numbers.of_tenant(b"secret", "bob")
    shown = ann.shown(number)
    assert ann.real(shown) == number
    assert 0 < shown < 2**52
    assert shown not in (
        number,
        bob.shown(number),
        Numbers.of_tenant(b"other", "ann").shown(number),
    )
    assert ann.shown(0) == ann.real(0) == 0
    assert ann.real(2**52) == ann.real(-5) == ann.real(2**70) == -1


async def test_a_tenants_numbers(make_client: MakeClient) -> None:
    """None is one of the store's; each is the same wherever it is seen, and answers later requests."""
    client = await make_client(api_keys=KEYS)
    ann = key("ka") | {"X-Towerd-Session": "diary"}

    async def get(path: str, status: int = 200) -> Any:
        async with client.get(f"{OWN}/{path}", headers=key("ka")) as reply:
            assert reply.status == status, await reply.text()
            return await reply.json()

    async def found_by(word: str) -> list[Any]:
        hits: list[Any] = []
        for _ in range(2000):  # turns are read in the background
            if hits := (await get(f"search?q={word}"))["results"]:
                break
            await asyncio.sleep(0.01)
        return hits

    body = {"n_predict": 3, "temperature": 0, "id_slot": 1}
    for prompt in ("Once upon a", "Once upon a red", "Once upon a red ball"):
        for headers in (ann, key("kb")):
            reply = await client.post(
                "/completion", json={**body, "prompt": prompt}, headers=headers
            )
            assert (await reply.json())["id_slot"] == 0
    session = await get("sessions/diary")
    turns, listed = session["turns"], await get("segments?sort=id")
    leaf = turns[-1]["reply_node"]
    segment = (await get(f"segments/{leaf}"))["segment"]
    assert session["session"]["leaf"] == turns[-1]["id"]
    assert turns[-1]["parent"] == turns[-2]["id"]
    assert segment["id"] == segment["path"][-1] == leaf
    assert {each["id"] for each in listed["segments"]} >= {*segment["path"]}
    for each in segment["path"]:
        assert (await get(f"segments/{each}/why"))["why"]["n_hot"] is None
        assert (await get(f"trie?root={each}"))["root"] == each
    said = [await get(f"sessions/diary?messages=1&turn={turn['id']}") for turn in turns]
    assert len({str(each["messages"]) for each in said}) == len(turns)
    (hit,) = await found_by("red")
    assert hit["turn"] in [turn["id"] for turn in turns]

    assert client.app is not None
    store = client.app[GATE].open().store
    real = {node.id for node in store.nodes()} | {turn.id for turn in store.turns("diary", "ann")}
    seen = set(numbers_in([session, listed, segment, await get("trie"), *said]))
    assert len(seen) >= len(turns)
    assert real.isdisjoint(seen)
    for number in real:
        message = (await get(f"segments/{number}", 404))["error"]["message"]
        assert message == f"there is no segment {number}"
        await get(f"sessions/diary?messages=1&turn={number}", 404)


async def test_a_tenants_slots(make_client: MakeClient) -> None:
    """They say no more of idle ones than that there are as many."""
    client = await make_client(api_keys=KEYS, parallel=3)
    for name in ("ka", "kb", "ka"):
        reply = await client.post(
            "/completion", json={"prompt": "abc", "n_predict": 2}, headers=key(name)
        )
        assert reply.status == 200
    async with client.get("/slots", headers=key("ka")) as reply:
        slots = await reply.json()
    assert [slot["id"] for slot in slots] == [0, 1, 2]
    assert len({str({**slot, "id": 0}) for slot in slots}) == 1


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_slots_in_replies_of_a_llama_server(n: int) -> None:
    """They are hidden wherever the reply is cut, its length stays, and nobody's words change."""
    said = b'{"content":"say \\"id_slot\\":7, {","id_slot":12,"x":[{"id_slot":3},{"id_slot":-1}]}'
    right = said.replace(b'"id_slot":12', b'"id_slot": 0').replace(b'"id_slot":3', b'"id_slot":0')
    right = right.replace(b'"id_slot":-1', b'"id_slot": 0')
    hider = SlotHider()
    parts = [hider.feed(said[at : at + n]) for at in range(0, len(said), n)]
    assert b"".join([*parts, hider.rest()]) == right
    assert len(right) == len(said)
    assert SlotHider().feed(b"data: %s\n\n" % said) == b"data: %s\n\n" % right
