"""towerd's own endpoints, the information endpoints and the page."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]


async def get(client: Client, path: str) -> Any:
    async with client.get(path) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def post(client: Client, path: str, body: Any, status: int = 200) -> Any:
    async with client.post(path, json=body) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def test_sessions(client: Client) -> None:
    """A session is listed, shown with its turns and text, renamed and deleted."""
    async with client.post(
        "/completion", json={"prompt": "abcdef"}, headers={"X-Towerd-Session": "a/b ü"}
    ) as reply:
        assert reply.status == 200
    listed = (await get(client, "/towerd/v1/sessions"))["sessions"]
    assert [(s["id"], s["n_turns"], s["named"]) for s in listed] == [("a/b ü", 1, True)]
    path = "/towerd/v1/sessions/a%2Fb%20%C3%BC"
    shown = await get(client, path + "?text=1&ids=1")
    assert shown["text"] == "<s>abcdefHello!\nYou</s>"
    assert len(shown["ids"]) == 7 + 11
    assert shown["turns"][0]["current"] is True
    async with client.patch(path, json={"title": "<b>hi</b>"}) as reply:
        assert (await reply.json())["session"]["title"] == "<b>hi</b>"
    for body in ({}, {"title": 3}, {"title": "x" * 10_000}):
        async with client.patch(path, json=body) as reply:
            assert reply.status == 400
    async with client.delete(path) as reply:
        assert await reply.json() == {"deleted": "a/b ü"}
    assert (await get(client, "/towerd/v1/sessions"))["sessions"] == []
    async with client.get(path) as reply:
        assert reply.status == 404


async def test_segments_and_trie(client: Client) -> None:
    """Two chats over one base make a tree of three segments."""
    for tail in "xy":
        await post(client, "/completion", {"prompt": "common base " + tail})
    page = await get(client, "/towerd/v1/segments?limit=2&sort=id")
    assert page["total"] > 2
    assert len(page["segments"]) == 2
    tree = await get(client, "/towerd/v1/trie")
    base = tree["trie"][0]
    assert (base["p0"], base["tokens"], len(base["children"])) == (0, 13, 2)
    assert tree["segments"] == page["total"]
    assert not tree["truncated"]
    shown = (await get(client, f"/towerd/v1/segments/{base['id']}?text=1&ids=1"))["segment"]
    assert shown["text"] == "<s>common base "
    assert len(shown["children"]) == 2
    child = base["children"][0]["id"]
    assert (await get(client, f"/towerd/v1/segments/{child}"))["segment"]["path"] == [
        base["id"], child,
    ]  # fmt: skip
    cut = await get(client, "/towerd/v1/trie?limit=1")
    assert (cut["segments"], cut["truncated"]) == (1, True)
    assert (await get(client, "/towerd/v1/trie?depth=1"))["trie"][0]["children"] == []
    below = await get(client, f"/towerd/v1/trie?root={base['id']}")
    assert len(below["trie"]) == 2


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("segments/999", 404), ("segments/x", 404), ("segments/-1", 404), ("sessions/nope", 404),
        ("segments?limit=0", 400), ("segments?limit=x", 400), ("segments?sort=x", 400),
        ("sessions?limit=99999", 400), ("trie?root=999", 404), ("segments/" + "9" * 40, 404),
    ],
)  # fmt: skip
async def test_wrong_questions(client: Client, path: str, status: int) -> None:
    """Unknown ids are 404, unusable parameters 400."""
    async with client.get(f"/towerd/v1/{path}") as reply:
        assert reply.status == status


async def test_pins(client: Client) -> None:
    """Segments are pinned by id or by session, and unpinned."""
    async with client.post(
        "/completion", json={"prompt": "abcdef"}, headers={"X-Towerd-Session": "s"}
    ) as reply:
        assert reply.status == 200
    pinned = (await post(client, "/towerd/v1/pins", {"session": "s"}))["pinned"]
    assert pinned["pinned"] is True
    again = (await post(client, "/towerd/v1/pins", {"segment": pinned["id"]}))["pinned"]
    assert again["id"] == pinned["id"]
    assert len((await get(client, "/towerd/v1/pins"))["pins"]) == 1
    for status in (200, 404):
        async with client.delete(f"/towerd/v1/pins/{pinned['id']}") as reply:
            assert reply.status == status
    await post(client, "/towerd/v1/pins", {}, 400)
    await post(client, "/towerd/v1/pins", {"segment": 1, "session": "s"}, 400)
    await post(client, "/towerd/v1/pins", {"segment": 999}, 404)


async def test_precache(client: Client, service: Any) -> None:
    """A base is evaluated without generating, stored under its name, and precached once."""
    body = {"name": "platform", "prompt": "You are kind. ", "level": 1, "public": True}
    first = await post(client, "/towerd/v1/precache", body)
    again = await post(client, "/towerd/v1/precache", body)
    assert first["base"] == again["base"]
    assert first["base"]["tokens"] == 15
    assert first["base"]["public"] is True
    request = service.sessions.seen[-1]
    assert (request.n_predict, request.precache, request.scope) == (0, "platform", "public")
    assert [base["name"] for base in (await get(client, "/towerd/v1/bases"))["bases"]] == [
        "platform"
    ]
    async with client.delete("/towerd/v1/bases/platform") as reply:
        assert reply.status == 200
    assert (await get(client, "/towerd/v1/bases"))["bases"] == []


async def test_precache_streams_progress(client: Client, sse: Any) -> None:
    """With stream the evaluation's progress comes first, the base last."""
    messages = [{"role": "system", "content": "kind"}]
    body = {"name": "b", "messages": messages, "stream": True, "public": False}
    async with client.post("/towerd/v1/precache", json=body) as reply:
        events = [json.loads(event) for event in sse(await reply.text())]
    assert events[0]["progress"]["total"] == events[-1]["base"]["tokens"]
    assert events[-1]["base"]["scope"] == "local"


@pytest.mark.parametrize(
    "body",
    [
        {}, {"name": "x"}, {"name": "", "prompt": "a"}, {"name": "x", "prompt": "a" * 600},
        {"name": "x", "prompt": "a", "messages": []}, {"name": "x", "prompt": "a", "level": -1},
        {"name": "x", "prompt": "a", "public": "yes"}, {"name": 3, "prompt": "a"},
        {"name": "a\nb", "prompt": "a"}, {"name": "x", "prompt": ["a", "b"]},
    ],
)  # fmt: skip
async def test_wrong_base(client: Client, body: Any) -> None:
    """A base without a name, a prompt, or one that does not fit is refused."""
    await post(client, "/towerd/v1/precache", body, 400)


async def test_upkeep(client: Client, sse: Any) -> None:
    """verify reports, with progress when streamed; gc removes what nothing needs."""
    await post(client, "/completion", {"prompt": "abc"})
    report = (await post(client, "/towerd/v1/verify", {}))["verify"]
    assert report["ok"] is True
    async with client.post("/towerd/v1/verify", json={"stream": True}) as reply:
        events = [json.loads(event) for event in sse(await reply.text())]
    assert events[-1]["verify"]["problems"] == []
    session = (await get(client, "/towerd/v1/sessions"))["sessions"][0]["id"]
    async with client.delete(f"/towerd/v1/sessions/{session}") as reply:
        assert reply.status == 200
    expected = (await post(client, "/towerd/v1/gc", {"dry_run": True}))["gc"]
    removed = (await post(client, "/towerd/v1/gc", {"quarantine_days": 1}))["gc"]
    assert removed == expected
    assert removed["segments"] > 0
    await post(client, "/towerd/v1/gc", {"quarantine_days": -1}, 400)


async def test_stats(client: Client) -> None:
    """stats has the gauges of engine, tiers and store, and the reuse so far."""
    await post(client, "/completion", {"prompt": "abcdef"})
    stats = await get(client, "/towerd/v1/stats")
    assert stats["reuse"] == {"live": 1, "hot": 1, "warm": 1, "prefill": 4}
    assert stats["store"]["sessions"] == 1
    assert stats["engine"]["live_cells_used"] == 7
    assert stats["model"] == "fake"


async def test_metrics(client: Client) -> None:
    """/metrics counts requests, tokens and times under llama-server's names and ours."""
    await post(client, "/completion", {"prompt": "abcdef", "n_predict": 2})
    async with client.get("/nope") as reply:
        assert reply.status == 404
    async with client.get("/metrics") as reply:
        text = await reply.text()
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4"
        assert int(reply.headers["Process-Start-Time-Unix"]) > 0
    lines = text.splitlines()
    for line in (
        'towerd_requests_total{route="/completion",status="200"} 1.0',
        'towerd_requests_total{route="unknown",status="404"} 1.0',
        'towerd_tokens_reused_total{tier="warm"} 1.0',
        "towerd_tokens_prefilled_total 4.0",
        "towerd_tokens_generated_total 2.0",
        "llamacpp:prompt_tokens_total 4.0",
        "llamacpp:prompt_tokens_cached_total 3.0",
        "llamacpp:tokens_predicted_total 2.0",
        "towerd_ttft_seconds_count 1.0",
        "towerd_live_cells_used 7.0",
        "towerd_sessions 1.0",
    ):
        assert line in lines


@pytest.mark.parametrize("name", ["slots", "metrics", "props"])
async def test_switched_off(make_client: MakeClient, name: str) -> None:
    """An endpoint that is switched off says so."""
    client = await make_client(**{f"{name}_endpoint": False})
    async with client.get(f"/{name}") as reply:
        assert reply.status == 501


async def test_slots_when_busy(client: Client, service: Any) -> None:
    """fail_on_no_slot answers 503 when every slot works."""
    async with client.get("/slots?fail_on_no_slot=1") as reply:
        assert len(await reply.json()) == 4
    service.engine.n_slots = 0
    async with client.get("/slots?fail_on_no_slot=1") as reply:
        assert reply.status == 503


async def test_text_endpoints(client: Client) -> None:
    """tokenize, detokenize, apply-template and the token counter."""
    assert (await post(client, "/tokenize", {"content": "hé"}))["tokens"] == [104, 195, 169]
    mixed = {"content": ["a", 98], "add_special": True, "with_pieces": True}
    assert (await post(client, "/tokenize", mixed))["tokens"] == [
        {"id": 256, "piece": "<s>"}, {"id": 97, "piece": "a"}, {"id": 98, "piece": "b"},
    ]  # fmt: skip
    pieces = await post(client, "/tokenize", {"content": "é", "with_pieces": True})
    assert [token["piece"] for token in pieces["tokens"]] == [[195], [169]]
    assert await post(client, "/detokenize", {"tokens": [104, 195, 169]}) == {"content": "hé"}
    assert await post(client, "/detokenize", {}) == {"content": ""}
    assert await post(client, "/tokenize", {}) == {"tokens": []}
    messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    rendered = await post(client, "/apply-template", {"messages": messages})
    assert rendered == {"prompt": "user: a\nb\n"}
    counted = await post(client, "/v1/chat/completions/input_tokens", {"messages": messages})
    assert counted == {"input_tokens": 11, "object": "response.input_tokens"}
    for path, body in (
        ("/tokenize", {"content": 3}), ("/tokenize", {"content": [1.5]}),
        ("/detokenize", {"tokens": "x"}), ("/detokenize", {"tokens": [1.5]}),
        ("/detokenize", {"tokens": [999]}),
    ):  # fmt: skip
        await post(client, path, body, 400)


async def test_page(client: Client) -> None:
    """The page has no outside assets and may run no script but its own."""
    for path, kind in (
        ("/towerd/", "text/html"), ("/towerd/page/page.js", "text/javascript"),
        ("/towerd/page/page.css", "text/css"),
    ):  # fmt: skip
        async with client.get(path) as reply:
            assert reply.status == 200
            assert reply.content_type == kind
            assert "default-src 'self'" in reply.headers["Content-Security-Policy"]
            text = await reply.text()
            assert "http://" not in text
            assert "https://" not in text
            assert "innerHTML" not in text
    async with client.get("/towerd/page/..%2Fpage.py") as reply:
        assert reply.status == 404
    async with client.get("/", allow_redirects=False) as reply:
        assert reply.headers["Location"] == "/towerd/"
