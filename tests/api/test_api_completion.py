"""What towerd adds to a completion: where the prompt came from, sessions, choices side by side, pings,
errors in the middle of a stream, clients that leave. The replies' own shapes are compared with
llama-server's in tests/wire and test_api_side_by_side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout, web
from aiohttp.test_utils import TestClient
from services import EmbeddedService
from waiting import until_async

from towerd.api.llama.task import Task

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]
Held = Callable[[Client], AbstractContextManager[EmbeddedService]]
Split = Callable[[str], list[str]]

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
DIALECTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/completion", {"prompt": "Hi"}),
    ("/infill", {"input_prefix": "Hi", "input_suffix": "you"}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {**CHAT, "max_tokens": 100}),
)
LONG = {"prompt": "Once", "n_predict": 8000, "ignore_eos": True}
LARGE = {"ctx_size": 8192, "live_tokens": 8192}


async def post(client: Client, path: str, body: Any, **headers: str) -> Any:
    async with client.post(path, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def stream(client: Client, sse: Split, path: str, body: dict[str, Any]) -> list[str]:
    """The data of every event, whose names are on lines of their own in two dialects."""
    async with client.post(path, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        blocks = (await reply.text()).split("\n\n")
        return sse("\n\n".join(block.partition("\n")[2] or block for block in blocks))


def texts(value: Any) -> str:
    """All text of a reply or an event, wherever its dialect has it."""
    if isinstance(value, dict):
        return "".join(
            item if key in ("content", "text", "delta") and isinstance(item, str) else texts(item)
            for key, item in value.items()
        )
    return "".join(map(texts, value)) if isinstance(value, list) else ""


@pytest.mark.parametrize(("path", "body"), DIALECTS, ids=[path for path, _ in DIALECTS])
async def test_every_dialect(
    make_client: MakeClient, scripted: Path, sse: Split, path: str, body: dict[str, Any]
) -> None:
    """The text, whole and streamed; what the second request reuses; the session in either."""
    client = await make_client(model=scripted)
    async with client.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
        n = int(reply.headers["X-Towerd-Reuse"].rpartition("=")[2])
        assert reply.headers["X-Towerd-Reuse"] == f"live=0,hot=0,warm=0,prefill={n}"
        assert texts(await reply.json()) == "Hello!\nYou"
        session = reply.headers["X-Towerd-Session"]
    async with client.post(path, json={**body, "stream": True}) as reply:
        assert reply.headers["X-Towerd-Reuse"] == f"live={n - 1},hot=0,warm=0,prefill=1"
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert await reply.text()
    events = [
        json.loads(event) for event in await stream(client, sse, path, body) if event != "[DONE]"
    ]
    (last,) = [event["towerd"] for event in events if "towerd" in event]
    assert last["reuse"] == {"live": n - 1, "hot": 0, "warm": 0, "prefill": 1}
    assert events[-1]["towerd"] == last
    listed = (await (await client.get("/towerd/v1/sessions")).json())["sessions"]
    assert {session, last["session"]} <= {each["id"] for each in listed}


async def test_defaults_of_the_model_and_of_the_daemon(client: Client) -> None:
    """The daemon's settings are the default; the request overrides them."""
    async with client.get("/props") as reply:
        said = (await reply.json())["default_generation_settings"]["params"]
    asked = await post(client, "/completion", {"prompt": "a", "n_predict": 1, "top_k": 9})
    found = asked["generation_settings"]
    assert (found["top_k"], found["min_p"]) == (9, said["min_p"])
    assert said["top_k"] != 9


async def test_a_prompt_that_is_only_evaluated(client: Client) -> None:
    """`n_predict: 0` generates nothing, unlike in llama-server; the prompt is live then."""
    body = {"prompt": [1, *range(300, 320)], "n_predict": 0}
    said = await post(client, "/completion", body)
    assert (said["content"], said["tokens_predicted"], said["tokens_evaluated"]) == ("", 0, 21)
    async with client.post("/completion", json=body | {"n_predict": 1}) as reply:
        assert reply.headers["X-Towerd-Reuse"] == "live=20,hot=0,warm=0,prefill=1"


async def test_silent_stream_is_pinged(client: Client, held: Held) -> None:
    """A stream with nothing to say yet gets its headers and a comment after the interval."""
    body = {"prompt": "Once", "n_predict": 3, "stream": True, "sse_ping_interval": 1}
    with held(client):
        reply = await client.post("/completion", json=body)
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert "X-Towerd-Reuse" not in reply.headers
        assert await reply.content.readany() == b":\n\n"
    assert b'"stop":true' in await reply.read()


async def test_choices(client: Client) -> None:
    """n choices of each prompt, in their order, counted together."""
    body = {"prompt": ["Once", "One day"], "n": 2, "max_tokens": 2, "temperature": 0}
    reply = await post(client, "/v1/completions", body)
    alone = [
        await post(client, "/v1/completions", body | {"prompt": p, "n": 1})
        for p in ("Once", "One day")
    ]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    first, second = (each["choices"][0]["text"] for each in alone)
    assert [choice["text"] for choice in reply["choices"]] == [first, first, second, second]


async def test_choices_run_side_by_side_in_order(client: Client, service: EmbeddedService) -> None:
    """A request of many choices has no more of them under way than the engine can run."""
    prompts = [f"{i}" for i in range(20)]
    body = {"prompt": prompts, "n": 2, "n_predict": 2}
    asking = asyncio.create_task(post(client, "/completion", body))
    most = 0
    while not asking.done():
        stats = service.engine.stats()
        most = max(most, stats["running"] + stats["waiting"])
        await asyncio.sleep(0)
    found = await asking
    assert [each["index"] for each in found] == list(range(40))
    assert [each["prompt"].split()[-1] for each in found] == [p for p in prompts for _ in range(2)]
    assert 1 < most <= service.engine.n_slots


async def test_choices_streamed(client: Client, sse: Split) -> None:
    """Streamed choices carry their index; every one has its closing chunk."""
    body = {**CHAT, "n": 3, "max_tokens": 2}
    events = await stream(client, sse, "/v1/chat/completions", body)
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]


async def test_session_header(client: Client, service: EmbeddedService) -> None:
    """X-Towerd-Session names the session."""
    await post(
        client, "/completion", {"prompt": "a", "n_predict": 1}, **{"X-Towerd-Session": "my chat"}
    )
    assert service.store.sessions()[0].id == "my chat"


async def test_truncated(client: Client) -> None:
    """A chat whose context was full is said to be, in shapes that have no word for it as well."""
    body = {"prompt": [300] * 500, "ignore_eos": True}
    assert (await post(client, "/completion", body))["truncated"] is True
    assert (await post(client, "/v1/completions", body))["towerd"] == {"truncated": True}


async def test_error_before_the_first_event(make_client: MakeClient) -> None:
    """What fails before the stream begins is an ordinary error reply: here the queue is full."""
    client = await make_client(parallel=1, queue_max=1, **LARGE)
    async with client.post("/completion", json=LONG | {"stream": True}) as running:
        waiting = asyncio.create_task(post(client, "/completion", {"prompt": "a", "n_predict": 1}))
        while (await (await client.get("/towerd/v1/stats")).json())["engine"]["waiting"] == 0:
            assert not waiting.done()
        async with client.post("/completion", json={"prompt": "b", "stream": True}) as reply:
            assert reply.status == 503
            assert "requests are waiting" in (await reply.json())["error"]["message"]
        running.close()
    assert (await waiting)["tokens_predicted"] == 1


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/responses"])
async def test_error_in_mid_stream(
    client: Client, service: EmbeddedService, sse: Split, path: str
) -> None:
    """What fails later arrives as an error event and ends the stream, and the slot is free: here no
    token is left to sample, by the request's own biases."""
    never = {"logit_bias": [[token, False] for token in range(service.engine.info.n_vocab)]}
    events = await stream(client, sse, path, {"prompt": "a", "input": "a", **CHAT, **never})
    last = json.loads(events[-1])
    assert last.get("error", last)["message"]
    assert not any(slot.is_processing for slot in service.engine.slots())
    async with client.post("/completion", json={"prompt": "a", **never}) as reply:
        assert (reply.status, (await reply.json())["error"]["type"]) == (
            400,
            "invalid_request_error",
        )


async def test_unexpected_error_is_not_shown(
    client: Client, sse: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug's text goes to the log, not to the client."""

    async def broken(*args: Any) -> bytes:
        raise RuntimeError("secret")

    monkeypatch.setattr(Task, "final", broken)
    body = {"prompt": "a", "n_predict": 2}
    events = await stream(client, sse, "/v1/completions", body)
    assert "secret" not in events[-1]
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    async with client.post("/completion", json=body) as reply:
        assert reply.status == 500
        assert "secret" not in await reply.text()


@pytest.mark.parametrize("streamed", [True, False])
async def test_client_that_leaves(make_client: MakeClient, held: Held, streamed: bool) -> None:
    """Its request is cancelled, streamed or not, and what was generated until then is kept."""
    client = await make_client(**LARGE)
    body = LONG | {"stream": streamed}
    with held(client) as service:
        if not streamed:
            with pytest.raises(TimeoutError):
                await client.post("/completion", json=body, timeout=ClientTimeout(total=0.2))
    if streamed:
        reply = await client.post("/completion", json=body)
        await reply.content.readany()
        reply.close()
    await until_async(
        lambda: not service.engine.is_busy() and not service.engine.slots()[0].is_processing
    )
    await service.sessions.drain()
    if streamed:
        (session,) = service.store.sessions()
        assert 0 < session.n_tokens < 8000
