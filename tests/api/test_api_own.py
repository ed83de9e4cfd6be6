"""towerd's own endpoints, the information endpoints and the page."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient
from services import EmbeddedService

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]
Held = Callable[[Client], AbstractContextManager[EmbeddedService]]

SHORT = {"prompt": "Once upon", "n_predict": 3, "temperature": 0, "return_tokens": True}


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
        "/completion", json=SHORT, headers={"X-Towerd-Session": "a/b ü"}
    ) as reply:
        said = await reply.json()
    listed = (await get(client, "/towerd/v1/sessions"))["sessions"]
    assert [(s["id"], s["n_turns"], s["named"]) for s in listed] == [("a/b ü", 1, True)]
    path = "/towerd/v1/sessions/a%2Fb%20%C3%BC"
    shown = await get(client, path + "?text=1&ids=1")
    prompt = {"content": SHORT["prompt"], "add_special": True}
    ids = (await post(client, "/tokenize", prompt))["tokens"]
    assert shown["ids"] == ids + said["tokens"]
    assert shown["text"] == "<s> Once upon" + said["content"]
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
    """Two chats over one base make a tree of a segment that both share and what follows it."""
    base_ids = [1, *range(300, 312)]
    for tail in (400, 401):
        await post(client, "/completion", SHORT | {"prompt": [*base_ids, tail]})
    page = await get(client, "/towerd/v1/segments?limit=2&sort=id")
    assert page["total"] > 2
    assert len(page["segments"]) == 2
    tree = await get(client, "/towerd/v1/trie")
    base = tree["trie"][0]
    assert (base["p0"], base["tokens"], len(base["children"])) == (0, 13, 2)
    assert tree["segments"] == page["total"]
    assert not tree["truncated"]
    shown = (await get(client, f"/towerd/v1/segments/{base['id']}?text=1&ids=1"))["segment"]
    assert shown["ids"] == base_ids
    text = (await post(client, "/detokenize", {"tokens": base_ids}))["content"]
    assert shown["text"] == text
    assert len(shown["children"]) == 2
    child = base["children"][0]["id"]
    assert (await get(client, f"/towerd/v1/segments/{child}"))["segment"]["path"] == [
        base["id"],
        child,
    ]
    cut = await get(client, "/towerd/v1/trie?limit=1")
    assert (cut["segments"], cut["truncated"]) == (1, True)
    assert (await get(client, "/towerd/v1/trie?depth=1"))["trie"][0]["children"] == []
    below = await get(client, f"/towerd/v1/trie?root={base['id']}")
    assert len(below["trie"]) == 2


async def test_wrong_questions(client: Client) -> None:
    """Unknown ids are 404, unusable parameters 400."""
    for path, status in (
        ("segments/999", 404),
        ("segments/x", 404),
        ("segments/-1", 404),
        ("sessions/nope", 404),
        ("segments?limit=0", 400),
        ("segments?limit=x", 400),
        ("segments?sort=x", 400),
        ("sessions?limit=99999", 400),
        ("trie?root=999", 404),
        ("segments/" + "9" * 40, 404),
    ):
        async with client.get(f"/towerd/v1/{path}") as reply:
            assert reply.status == status, path


async def test_pins(client: Client) -> None:
    """Segments are pinned by id or by session, and unpinned."""
    async with client.post("/completion", json=SHORT, headers={"X-Towerd-Session": "s"}) as reply:
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


async def test_precache(client: Client) -> None:
    """A base is evaluated without generating, stored under its name, and precached once; a prompt
    of any tenant begins with it."""
    body = {"name": "platform", "prompt": "You are kind. ", "level": 1, "public": True}
    first = await post(client, "/towerd/v1/precache", body)
    again = await post(client, "/towerd/v1/precache", body)
    n = first["base"]["tokens"]
    assert first["base"] == again["base"]
    assert (first["reuse"]["prefill"], again["reuse"]["prefill"]) == (n, 1)
    assert first["timings"]["predicted_n"] == again["timings"]["predicted_n"] == 0
    assert (first["base"]["public"], first["base"]["scope"]) == (True, "public")
    assert (await get(client, "/towerd/v1/sessions"))["sessions"] == []
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


async def test_wrong_base(client: Client) -> None:
    """A base without a name, a prompt, or one that does not fit is refused."""
    for body in (
        {},
        {"name": "x"},
        {"name": "", "prompt": "a"},
        {"name": "x", "prompt": "a " * 600},
        {"name": "x", "prompt": "a", "messages": []},
        {"name": "x", "prompt": "a", "level": -1},
        {"name": "x", "prompt": "a", "public": "yes"},
        {"name": 3, "prompt": "a"},
        {"name": "a\nb", "prompt": "a"},
        {"name": "x", "prompt": ["a", "b"]},
        {"name": "x", "messages": 3},
        {"name": "x", "messages": [{"role": "user"}]},
    ):
        await post(client, "/towerd/v1/precache", body, 400)
    assert (await get(client, "/towerd/v1/bases"))["bases"] == []


async def test_upkeep(client: Client, sse: Any) -> None:
    """verify reports, with progress when streamed; gc removes what nothing needs."""
    await post(client, "/completion", SHORT)
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


async def test_stats_and_metrics(client: Client) -> None:
    """Both count requests, tokens and times, /metrics under llama-server's names and ours."""
    said = [await post(client, "/completion", SHORT) for _ in range(2)]
    n = said[0]["tokens_evaluated"]
    async with client.get("/nope") as reply:
        assert reply.status == 404
    async with client.get("/", allow_redirects=False) as reply:
        assert reply.status == 302
    stats = await get(client, "/towerd/v1/stats")
    assert stats["reuse"] == {"live": n - 1, "hot": 0, "warm": 0, "prefill": n + 1}
    assert stats["store"]["sessions"] == len((await get(client, "/towerd/v1/sessions"))["sessions"])
    assert stats["model"] == "story"
    async with client.get("/metrics") as reply:
        text = await reply.text()
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4"
        assert int(reply.headers["Process-Start-Time-Unix"]) > 0
    lines = text.splitlines()
    for line in (
        'towerd_requests_total{route="/completion",status="200"} 2.0',
        'towerd_requests_total{route="unknown",status="404"} 1.0',
        'towerd_requests_total{route="/",status="302"} 1.0',
        f'towerd_tokens_reused_total{{tier="live"}} {n - 1}.0',
        f"towerd_tokens_prefilled_total {n + 1}.0",
        "towerd_tokens_generated_total 6.0",
        f"llamacpp:prompt_tokens_total {n + 1}.0",
        f"llamacpp:prompt_tokens_cached_total {n - 1}.0",
        "llamacpp:tokens_predicted_total 6.0",
        "towerd_ttft_seconds_count 2.0",
        f"towerd_sessions {float(stats['store']['sessions'])}",
    ):
        assert line in lines


async def test_switched_off(make_client: MakeClient) -> None:
    """An endpoint that is switched off says so, as llama-server's does."""
    names = ("slots", "metrics", "props")
    client = await make_client(**{f"{name}_endpoint": False for name in names})
    for name in names:
        async with client.get(f"/{name}") as reply:
            assert (reply.status, (await reply.json())["error"]["type"]) == (
                501,
                "not_supported_error",
            )


async def test_slots_when_busy(make_client: MakeClient, held: Held) -> None:
    """fail_on_no_slot answers 503 when every slot works."""
    client = await make_client(parallel=1, ctx_size=8192, live_tokens=8192)
    (slot,) = await get(client, "/slots?fail_on_no_slot=1")
    assert slot["is_processing"] is False
    long = {"prompt": "Once", "n_predict": 8000, "ignore_eos": True, "stream": True}
    async with client.post("/completion", json=long) as stream:
        assert stream.status == 200  # the prompt is evaluated
        with held(client):
            async with client.get("/slots?fail_on_no_slot=1") as reply:
                assert reply.status == 503
            (slot,) = await get(client, "/slots")
            assert (slot["is_processing"], slot["params"]["n_predict"]) == (True, 8000)
        stream.close()


async def test_text_endpoints(client: Client) -> None:
    """tokenize and detokenize are each other's inverse, in pieces as well; the token counters count
    what a request evaluates."""
    text = "Once upon a 你 time"
    ids = (await post(client, "/tokenize", {"content": text}))["tokens"]
    assert (await post(client, "/detokenize", {"tokens": ids}))["content"] == " " + text
    with_pieces = {"content": [text, 1], "with_pieces": True}
    pieces = (await post(client, "/tokenize", with_pieces))["tokens"]
    assert [piece["id"] for piece in pieces] == [*ids, 1]
    data = [p.encode() if isinstance(p, str) else bytes(p) for p in (t["piece"] for t in pieces)]
    assert b"".join(data).decode() == f" {text}<s>"
    messages = [{"role": "user", "content": text}]
    for path, counter, body in (
        ("/v1/chat/completions", "/v1/chat/completions/input_tokens", {"messages": messages}),
        ("/v1/responses", "/v1/responses/input_tokens", {"input": text}),
        ("/v1/messages", "/v1/messages/count_tokens", {"messages": messages}),
    ):
        n = (await post(client, counter, body))["input_tokens"]
        async with client.post(path, json=body | {"max_tokens": 1}) as reply:
            tiers = (part.split("=") for part in reply.headers["X-Towerd-Reuse"].split(","))
            assert sum(int(each) for _, each in tiers) == n, path


async def test_page(client: Client) -> None:
    """The page has no outside assets and may run no script but its own."""
    for path, kind in (
        ("/towerd/", "text/html"),
        ("/towerd/page/main.js", "text/javascript"),
        ("/towerd/page/page.css", "text/css"),
    ):
        async with client.get(path) as reply:
            assert reply.status == 200
            assert reply.content_type == kind
            assert (
                "default-src 'none'; script-src 'self';" in reply.headers["Content-Security-Policy"]
            )
            text = await reply.text()
            assert "http://" not in text
            assert "https://" not in text
            assert "innerHTML" not in text
    async with client.get("/towerd/page/..%2Fpage.py") as reply:
        assert reply.status == 404
    async with client.get("/", allow_redirects=False) as reply:
        assert reply.headers["Location"] == "/towerd/#/no-chat-page"
