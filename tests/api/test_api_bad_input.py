"""Wrong requests: each has its status, its type word and a message that says what is wrong, and
nothing is lost by it. The words for each field are tested against llama-server in tests/wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.api.http.limits import Limits
from towerd.api.llama.unsupported import DISABLED, UNSUPPORTED

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]

USER = [{"role": "user", "content": "x"}]
NO_OBJECT = (
    b"{bad",
    b"[1]",
    b"3",
    b'"x"',
    b"null",
    b'{"prompt": "\xff"}',
    b"[" * 100_000,
    b'{"a": 1e999}',
)
WRONG: tuple[tuple[str, Any], ...] = (
    ("/completion", {}),
    ("/completion", {"prompt": [99_999]}),
    ("/completion", {"prompt": "a", "temperature": "hot"}),
    ("/completion", {"prompt": "a", "stream": "yes"}),
    ("/completion", {"prompt": "a", "grammar": "root ::= x"}),
    ("/completion", {"prompt": "a", "json_schema": {"type": "no"}, "stream": True}),
    ("/completion", {"prompt": ["a", "b"], "n": 99}),
    ("/completion", {"prompt": "a", "retention": "some"}),
    ("/completion", {"prompt": "a", "live_budget": 100}),
    ("/v1/completions", {"prompt": "a", "n_probs": 10**6}),
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"messages": [3]}),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "x"}]}),
    ("/v1/chat/completions/input_tokens", {"messages": 3}),
    ("/v1/responses", {}),
    ("/v1/responses", {"input": 3, "stream": True}),
    ("/v1/responses/input_tokens", {}),
    ("/v1/messages", {}),
    ("/v1/messages", {"messages": [{"role": "user"}]}),
    ("/v1/messages/count_tokens", {}),
    ("/apply-template", {"messages": 3}),
    ("/tokenize", {"content": ["a"] * 20_000}),
    ("/tokenize", {"content": 3}),
    ("/tokenize", {"content": [1.5]}),
    ("/detokenize", {"tokens": "x"}),
    ("/detokenize", {"tokens": [1.5]}),
    ("/detokenize", {"tokens": [999]}),
)


async def error(client: Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data) as reply:
        text = await reply.text()
        assert reply.status == status, (path, body, text)
        assert reply.content_type == "application/json"
    found: dict[str, Any] = json.loads(text)["error"]
    wanted = {"message", "type"} if path.startswith("/v1/messages") else {"code", "message", "type"}
    assert set(found) >= wanted
    return found


async def test_nothing_is_lost(client: Client, service: Any) -> None:
    """However many requests are refused: nothing runs for them, nothing is stored, and the chat
    before them continues where it was."""
    talk = {"prompt": "Once upon a time", "n_predict": 8, "return_tokens": True, "temperature": 0}
    reply = await (await client.post("/completion", json=talk)).json()
    before = service.store.sessions(), len(service.store.nodes()), service.engine.stats()["tasks"]
    for path in ("/completion", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        for body in NO_OBJECT:
            assert (await error(client, path, body))["type"] == "invalid_request_error"
    for path, fields in WRONG:
        assert (await error(client, path, fields))["type"] == "invalid_request_error"
    for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show", "/api/pull"):
        for body in NO_OBJECT:
            async with client.post(path, data=body) as refused:
                assert refused.status == 400
                assert isinstance((await refused.json())["error"], str)
    after = service.store.sessions(), len(service.store.nodes()), service.engine.stats()["tasks"]
    assert after == before
    on = {"prompt": talk["prompt"] + reply["content"] + " And", "n_predict": 1}
    async with client.post("/completion", json=on) as again:
        live = dict(part.split("=") for part in again.headers["X-Towerd-Reuse"].split(","))["live"]
    assert int(live) >= reply["tokens_evaluated"] + reply["tokens_predicted"] - 1


async def test_prompt_over_the_context(client: Client) -> None:
    """Too long a prompt says by how much, streamed or not, in every dialect."""
    long = "x " * 600
    for path, fields in (
        ("/completion", {"prompt": long}),
        ("/completion", {"prompt": long, "stream": True}),
        ("/completion", {"prompt": ["a", [300] * 512]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"input": long}),
    ):
        found = await error(client, path, fields)
        assert found["type"] == "exceed_context_size_error"
        assert found["n_prompt_tokens"] >= found["n_ctx"] == 512


async def test_body_over_the_limit(make_client: MakeClient) -> None:
    """A body over request_bytes_max is refused, announced or not."""
    client = await make_client(request_bytes_max=2000)
    found = await error(client, "/completion", {"prompt": "x" * 3000}, 413)
    assert "2000 bytes" in found["message"]

    async def chunks() -> Any:
        for _ in range(30):
            yield b"x" * 100

    async with client.post("/completion", data=chunks()) as reply:
        assert reply.status == 413


async def test_body_that_stops(make_client: MakeClient) -> None:
    """A client that stops in the middle of its body gets an error, and affects nothing else."""
    client = await make_client(limits=Limits(read_stall_s=0.1))
    never = asyncio.Event()

    async def stalls() -> Any:
        yield b'{"prompt":'
        await never.wait()

    async with client.post("/completion", data=stalls()) as reply:
        assert reply.status == 408
        assert (await reply.json())["error"]["code"] == 408


async def test_hint_that_is_no_name(client: Client) -> None:
    """X-Towerd-Session and the other names are short and printable."""
    for bad in ("x" * 129, "a\tb"):
        for name in ("Session", "Workflow", "Agent"):
            headers = {f"X-Towerd-{name}": bad}
            async with client.post("/completion", json={"prompt": "a"}, headers=headers) as reply:
                assert reply.status == 400


async def test_what_another_engine_can(client: Client) -> None:
    """What this engine cannot do says what to do, with a status that clients do not retry."""
    for (method, path), why in UNSUPPORTED.items():
        async with client.request(method, path.replace("{id_slot}", "0")) as reply:
            assert reply.status == 400, path
            error = (await reply.json())["error"]
        assert error["type"] == "not_supported_error"
        assert error["message"].endswith(why)


async def test_what_is_off_by_default(client: Client) -> None:
    """As in llama-server, whose web UI then does without."""
    for method, path in DISABLED:
        async with client.request(method, path) as reply:
            assert (reply.status, (await reply.json())["error"]["type"]) == (
                403,
                "feature_disabled",
            )


async def test_any_model_name_is_served(client: Client) -> None:
    """There is one model, and replies have its name."""
    body = {"messages": USER, "max_tokens": 1, "model": "gpt-9"}
    for path in ("/v1/chat/completions", "/v1/messages"):
        async with client.post(path, json=body) as reply:
            assert (reply.status, (await reply.json())["model"]) == (200, "story")


async def test_unknown_route_and_method(client: Client) -> None:
    """Unknown paths are 404, known ones with another method 405, both in the error shape."""
    found = await error(client, "/nope", {}, 404)
    assert found == {"code": 404, "message": "File Not Found", "type": "not_found_error"}
    async with client.get("/completion") as reply:
        assert reply.status == 405
        assert reply.headers["Allow"] == "POST"
        assert (await reply.json())["error"]["code"] == 405
