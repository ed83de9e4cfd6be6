"""Wrong requests: each has its status, its type word and a message that names the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.api.limits import Limits

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]


async def error(client: Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data) as reply:
        text = await reply.text()
        assert reply.status == status, text
    found: dict[str, Any] = json.loads(text)["error"]
    assert found["code"] == status
    assert set(found) >= {"code", "message", "type"}
    return found


@pytest.mark.parametrize(
    "body",
    [
        b"{bad",
        b"[1]",
        b"3",
        b'"x"',
        b"null",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a": 1e999}',
    ],
)
async def test_not_a_json_object(client: Client, body: bytes) -> None:
    """Anything but a JSON object is the client's mistake."""
    assert (await error(client, "/completion", body))["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", True), ("temperature", [1]),
        ("top_k", "40"), ("top_k", 1.5), ("top_p", {}), ("min_p", "x"), ("seed", "x"),
        ("n_predict", -2), ("n_predict", "x"), ("max_tokens", 2**40), ("n_keep", -2),
        ("repeat_last_n", -1), ("mirostat", "2"), ("n_probs", -1), ("n_probs", 10**6),
        ("stream", 1), ("stream", "yes"), ("cache_prompt", 0), ("ignore_eos", "x"),
        ("stop", 3), ("stop", [1]), ("samplers", 3), ("samplers", [3]), ("grammar", 3),
        ("json_schema", 3), ("logit_bias", 3), ("logit_bias", [3]), ("logit_bias", {"1": "x"}),
        ("dry_sequence_breakers", []), ("dry_sequence_breakers", "x"), ("n", 0), ("n", 99),
        ("stream_options", 3), ("response_fields", "x"), ("model", 3), ("sse_ping_interval", -2),
        ("temperature", 10**400),
    ],
)  # fmt: skip
async def test_wrong_field(client: Client, field: str, value: Any) -> None:
    """A value of a wrong type or beyond its range is refused by name."""
    found = await error(client, "/completion", {"prompt": "a", field: value})
    assert f"'{field}'" in found["message"]


@pytest.mark.parametrize(
    "prompt", [3, None, [], "", [300], [-1], [[]], ["a", 1.5], {"x": 1}, [True], [2**70], [1, None]]
)
async def test_wrong_prompt(client: Client, service: Any, prompt: Any) -> None:
    """A prompt that is no prompt, or none of this vocabulary."""
    if prompt == "":
        service.engine.tokenize = _no_tokens
    assert (await error(client, "/completion", {"prompt": prompt}))["type"] == (
        "invalid_request_error"
    )


async def _no_tokens(text: str, *, add_special: bool, parse_special: bool) -> Any:
    import numpy as np

    return np.zeros(0, np.int32)


@pytest.mark.parametrize(
    "messages",
    [
        None, 3, [3], [{}], [{"role": "user"}], [{"role": 3, "content": "x"}],
        [{"role": "user", "content": 3}], [{"role": "assistant"}],
        [{"role": "user", "content": [{"type": "what"}]}], [{"role": "user", "content": [3]}],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    ],
)  # fmt: skip
async def test_wrong_messages(client: Client, messages: Any) -> None:
    """Messages that are not messages."""
    await error(client, "/v1/chat/completions", {"messages": messages})


@pytest.mark.parametrize(
    "extra",
    [
        {"top_logprobs": 2}, {"response_format": {"type": "bad"}}, {"response_format": 3},
        {"json_schema": {"type": "object"}, "grammar": 'root ::= "a"'},
        {"chat_template_kwargs": 3},
    ],
)  # fmt: skip
async def test_wrong_chat_field(client: Client, extra: dict[str, Any]) -> None:
    """Chat's own fields are checked as well."""
    messages = [{"role": "user", "content": "x"}]
    await error(client, "/v1/chat/completions", {"messages": messages, **extra})


async def test_prompt_over_the_context(client: Client) -> None:
    """Too long a prompt says by how much."""
    found = await error(client, "/completion", {"prompt": "x" * 600})
    assert found["type"] == "exceed_context_size_error"
    assert (found["n_prompt_tokens"], found["n_ctx"]) == (601, 512)


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
    """A client that stops in the middle of its body is told, and lets go of nothing else."""
    client = await make_client(limits=Limits(read_stall_s=0.1))
    never = asyncio.Event()

    async def stalls() -> Any:
        yield b'{"prompt":'
        await never.wait()

    async with client.post("/completion", data=stalls()) as reply:
        assert reply.status == 408
        assert (await reply.json())["error"]["code"] == 408


async def test_unknown_model(client: Client) -> None:
    """Names of this model are accepted, others are told which there are."""
    for name in ("fake", "fake-7b", "fake-7b.gguf", "", None):
        async with client.post("/completion", json={"prompt": "a", "model": name}) as reply:
            assert reply.status == 200
    found = await error(client, "/completion", {"prompt": "a", "model": "gpt-4"}, 404)
    assert found["type"] == "not_found_error"
    assert "'gpt-4'" in found["message"]
    assert "fake" in found["message"]


async def test_unknown_route_and_method(client: Client) -> None:
    """Unknown paths are 404, known ones with another method 405, both in the error shape."""
    found = await error(client, "/nope", {}, 404)
    assert found == {"code": 404, "message": "File Not Found", "type": "not_found_error"}
    async with client.get("/completion") as reply:
        assert reply.status == 405
        assert reply.headers["Allow"] == "POST"
        assert (await reply.json())["error"]["code"] == 405


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", {}), ("/v1/embeddings", {}), ("/slots/0?action=save", {}), ("/props", {}),
        ("/v1/messages", {}), ("/v1/responses", {}), ("/rerank", {}), ("/lora-adapters", []),
        ("/v1/streams/lookup", {}),
        ("/completion", {"prompt": "a", "lora": [{"id": 0}]}),
        ("/completion", {"prompt": "a", "suffix": "b"}),
        ("/completion", {"prompt": "a", "samplers": ["infill"]}),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}),
        ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"messages": [], "tool_choice": "required"}),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ],
)  # fmt: skip
async def test_what_another_engine_can(client: Client, path: str, body: Any) -> None:
    """What this engine cannot do names the one that can."""
    found = await error(client, path, body, 501)
    assert found["type"] == "not_supported_error"
    assert "llama-server engine" in found["message"]
