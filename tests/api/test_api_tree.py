"""The tree as boxes by size, against all its segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from many_chats import record_chats
from oracle import settle
from services import EmbeddedService
from tenants_talk import KEYS, Client, key, talk

MakeClient = Callable[..., Awaitable[Client]]
OWN = "/towerd/v1"


async def value(reply: Any, status: int = 200) -> Any:
    assert reply.status == status, await reply.text()
    return await reply.json()


def every(picture: Any) -> Iterator[Any]:
    """All boxes of a picture."""
    for box in picture["boxes"]:
        yield box
        yield from every(box)


def assert_sums(picture: Any, own: int) -> None:
    """What is in a box is what is in it alone and in those below."""
    inner = [*picture["boxes"], *picture["groups"]]
    assert picture["tokens"] == own + sum(each["tokens"] for each in inner)
    for box in picture["boxes"]:
        assert_sums(box, box["own"]["tokens"])
        assert sum(box["own"][place] for place in ("hot", "warm", "none")) == box["own"]["tokens"]


async def test_all_of_a_large_tree_is_in_its_picture(
    client: Client, service: EmbeddedService
) -> None:
    """At 1,000 chats no box is smaller than asked for, and what is smaller is found in its group."""
    record_chats(service.store, 1000)
    nodes = service.store.nodes()
    whole = await value(await client.get(f"{OWN}/tree?parts=300&text=1"))
    assert (whole["tokens"], whole["segments"]) == (sum(n.n for n in nodes), len(nodes))
    assert_sums(whole, 0)
    boxes = list(every(whole))
    assert min(box["tokens"] for box in boxes) >= whole["least"]
    assert 1 < len(boxes) < 600
    base = next(box for box in boxes if box["own"]["tokens"] >= 60 and box["boxes"] + box["groups"])
    group = max(base["groups"], key=lambda each: each["boxes"])
    assert group["boxes"] > 1
    query = f"root={group['root']}&from={group['from']}&boxes={group['boxes']}"
    inner = await value(await client.get(f"{OWN}/tree?{query}&parts=300"))
    assert (inner["tokens"], inner["segments"]) == (group["tokens"], group["segments"])
    assert len(inner["boxes"]) == group["boxes"]
    one = await value(await client.get(f"{OWN}/tree?root={inner['boxes'][0]['id']}"))
    assert one["tokens"] == inner["boxes"][0]["tokens"]
    assert (await value(await client.get(f"{OWN}/tree?root=10000000"), 404))["error"]


async def test_places_are_those_of_the_segments(client: Client, service: EmbeddedService) -> None:
    await talk(client)
    await settle(service)
    whole = await value(await client.get(f"{OWN}/tree"))
    (box,) = whole["boxes"]
    path = [node for node in service.store.nodes() if node.p0 >= 0]
    places = Counter[str]()
    for node in path:
        places["hot" if node.hot is not None else "warm" if node.file else "none"] += node.n
    assert {place: box["own"][place] for place in ("hot", "warm", "none")} == {
        "hot": places["hot"],
        "warm": places["warm"],
        "none": places["none"],
    }


async def test_tenants_see_their_own(make_client: MakeClient) -> None:
    client = await make_client(api_keys=KEYS)
    await talk(client, **key("ka"))
    for name, n in (("ka", 1), ("kb", 0)):
        found = await value(await client.get(f"{OWN}/tree", headers=key(name)))
        assert len(found["boxes"]) == n
    mine = await value(await client.get(f"{OWN}/tree", headers=key("ka")))
    path = f"{OWN}/tree?root={mine['boxes'][0]['id']}"
    assert (await value(await client.get(path, headers=key("ka"))))["tokens"] == mine["tokens"]
    await value(await client.get(path, headers=key("kb")), 404)


async def test_the_event_loop_is_never_blocked(
    client: Client, service: EmbeddedService, loop_time: Any
) -> None:
    record_chats(service.store, 1000)

    async def work() -> None:
        await value(await client.get(f"{OWN}/tree?parts=4000&text=1"))

    await loop_time.watch(work)
