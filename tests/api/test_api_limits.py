"""Requests with too many of anything: refused by name, before anything runs."""

from __future__ import annotations

import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.api import bigjson
from towerd.api.limits import Limits
from towerd.errors import InvalidRequest

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]

LIMITS = Limits()
MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def filled(field: str, value: Any, most: int) -> list[tuple[str, dict[str, Any], str]]:
    """A completion that has one entry more than it may."""
    many = dict.fromkeys(map(str, range(most + 1)), value)
    return [("/completion", {"prompt": "a", field: [value] * (most + 1)}, f"'{field}'"),
            ("/completion", {"prompt": "a", field: many}, f"'{field}'")]  # fmt: skip


def sent(body: Any) -> io.BytesIO:
    """A body that a client may be sending for a while."""
    return io.BytesIO(json.dumps(body).encode())


TOO_MANY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [MESSAGE] * 65_537}, "'messages'"),
    ("/v1/chat/completions", {"messages": [{**MESSAGE, "content": [PART] * 65_537}]},
     "65536 content parts"),
    ("/v1/chat/completions", {"messages": [{**MESSAGE, "content": [PART] * 17}] * 4000},
     "65536 content parts"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 65_537}]},
     "tool calls"),
    ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [TOOL] * 4097}, "'tools'"),
    ("/v1/chat/completions", {"messages": [MESSAGE], "functions": [TOOL] * 4097}, "'functions'"),
    ("/v1/chat/completions",
     {"messages": [MESSAGE], "chat_template_kwargs": {str(i): i for i in range(1025)}},
     "'chat_template_kwargs'"),
    ("/v1/chat/completions/input_tokens", {"messages": [MESSAGE] * 65_537}, "'messages'"),
    ("/apply-template", {"messages": [MESSAGE] * 65_537}, "'messages'"),
    *filled("stop", "x", LIMITS.stops_max),
    *filled("logit_bias", 1.5, LIMITS.biases_max),
    *filled("samplers", "top_k", LIMITS.samplers_max),
    ("/completion", {"prompt": "a", "samplers": "k" * 65}, "'samplers'"),
    *filled("dry_sequence_breakers", "x", LIMITS.breakers_max),
    *filled("response_fields", "x", LIMITS.response_fields_max),
    ("/completion", {"prompt": ["a"] * 1025}, '"prompt"'),
    ("/completion", {"prompt": ["a"] * 1000, "n": 3}, "asks for 3000"),
    ("/completion", {"prompt": ["a", *[7] * 500_001]}, "500000 values"),
    ("/completion", {"prompt": "a", "unknown": [[]] * 500_002}, "500000 values"),
    ("/tokenize", {"content": ["a"] * 500_002}, "500000 values"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), TOO_MANY, ids=range(len(TOO_MANY)))
async def test_too_many(
    client: Client, service: Any, path: str, body: dict[str, Any], words: str
) -> None:
    """The error says what there is too much of, and how much may be."""
    async with client.post(path, data=sent(body)) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["type"]) == (400, "invalid_request_error"), error
    assert words in error["message"]
    assert not service.sessions.seen


async def test_as_many_as_allowed(client: Client, service: Any) -> None:
    """What is at its limit is looked at further."""
    within = {"messages": [MESSAGE] * 65_536}
    async with client.post("/v1/chat/completions", data=sent(within)) as reply:
        assert (await reply.json())["error"]["type"] == "exceed_context_size_error"
    body = {
        "prompt": "a", "stop": ["x"] * 1024, "samplers": "k" * 64, "response_fields": ["stop"] * 1024,
        "logit_bias": [[7, 1.5]] * 131_072, "dry_sequence_breakers": ["x"] * 64,
    }  # fmt: skip
    async with client.post("/completion", data=sent(body)) as reply:
        assert await reply.json() == {"stop": True}
    assert len(service.sessions.seen) == 1


async def test_limits_can_be_set(make_client: MakeClient) -> None:
    """They are those of the application."""
    client = await make_client(limits=Limits(messages_max=2))
    async with client.post("/apply-template", json={"messages": [MESSAGE] * 3}) as reply:
        error = (await reply.json())["error"]
    assert error["message"] == "Field 'messages': at most 2 entries are allowed, but it has 3"


def test_text_is_no_value() -> None:
    """However many commas it has."""
    text = {"text": [', "a"\\, ' * 100] * 1000}
    data = json.dumps(text).encode()
    assert bigjson.decode(data, values_max=1000) == text
    with pytest.raises(InvalidRequest, match="more than 998 values"):
        bigjson.decode(data, values_max=998)


async def test_choices_run_side_by_side_in_order(client: Client, service: Any) -> None:
    """A request of many choices has no more of them under way than the engine can run."""
    most = 0
    run = service.sessions.run

    def watched(request: Any) -> Any:
        nonlocal most
        most = max(most, service.sessions.open + 1)
        return run(request)

    service.sessions.run = watched
    prompts = [f"{i}" for i in range(40)]
    async with client.post("/completion", json={"prompt": prompts, "n": 2}) as reply:
        found = await reply.json()
    assert [each["index"] for each in found] == list(range(80))
    assert [each["prompt"][3:] for each in found] == [p for p in prompts for _ in range(2)]
    assert most == service.engine.n_slots
