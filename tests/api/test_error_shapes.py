"""Errors have the shape of the API that was asked, whatever refuses the request and whenever."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.api.http.keys import GATE
from towerd.api.http.reply import event_of_reply, reshaped
from towerd.api.llama.task import Task
from towerd.errors import ContextExceeded, DiskFull

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]

USER = {"role": "user", "content": "Once upon a time"}
MESSAGES = {"messages": [USER], "max_tokens": 4}
COUNTER = "/v1/messages/count_tokens"
PATHS = ("/v1/messages", COUNTER)


async def refused(client: Client, path: str, **asked: Any) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error."""
    method = asked.pop("method", "POST")
    async with client.request(method, path, **asked) as reply:
        assert reply.content_type == "application/json"
        return reply.status, await reply.json()


@pytest.mark.parametrize("path", PATHS)
async def test_anthropics_shape(make_client: MakeClient, path: str) -> None:
    """From the key to the body: a type of Anthropic's by status, and nothing of llama-server's."""
    client = await make_client(api_keys=(("sk", "ann"),), request_bytes_max=2000)
    key = {"X-Api-Key": "sk"}
    asked: list[tuple[int, str, str, dict[str, Any]]] = [
        (401, "authentication_error", path, {"json": MESSAGES}),
        (403, "permission_error", path, {"json": MESSAGES, "headers": {"Origin": "http://e.org"}}),
        (404, "not_found_error", path + "/nope", {"headers": key}),
        (405, "invalid_request_error", path, {"headers": key, "method": "GET"}),
        (413, "request_too_large", path, {"headers": key, "data": b" " * 3000}),
        (400, "invalid_request_error", path, {"headers": key, "data": b"{"}),
        (400, "invalid_request_error", path, {"headers": key, "json": {}}),
    ]
    for status, kind, where, request in asked:
        found, body = await refused(client, where, **request)
        assert (found, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert set(body) == {"type", "error"}
        assert set(body["error"]) == {"type", "message"}
        assert body["error"]["message"]
    found, body = await refused(client, "/v1/chat/completions", json=MESSAGES)
    assert (found, body["error"]["code"]) == (401, 401)


async def test_anthropics_shape_when_busy(make_client: MakeClient) -> None:
    """A daemon that leaves is overloaded to them; one whose disk is full failed."""
    client = await make_client()
    assert client.app is not None
    client.app[GATE].closing = True
    found, body = await refused(client, "/v1/messages", json=MESSAGES)
    assert (found, body["error"]["type"]) == (503, "overloaded_error")
    full = json.dumps(DiskFull("x").body()).encode()
    assert json.loads(reshaped("/v1/messages", full))["error"]["type"] == "api_error"


async def test_too_long(client: Client) -> None:
    """Each API's programs find the words that they look for; llama-server's own stay beside OpenAI's."""
    n_ctx = 512
    text = "once upon a time " * 400
    long = [{"role": "user", "content": text}]
    _, body = await refused(client, "/completion", json={"prompt": text})
    assert body == ContextExceeded.of_request(body["error"]["n_prompt_tokens"], n_ctx).body()
    for stream in (False, True):
        asked: dict[str, Any] = {"messages": long, "stream": stream, "max_tokens": 4}
        status, body = await refused(client, "/v1/messages", json=asked)
        words = body["error"].pop("message").split()
        assert (status, body) == (
            400,
            {"type": "error", "error": {"type": "invalid_request_error"}},
        )
        assert words[:4] == ["prompt", "is", "too", "long:"]
        assert words[5:] == ["tokens", ">", str(n_ctx), "maximum"]
        for path, field in (
            ("/v1/chat/completions", {"messages": long}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/responses", {"input": text}),
        ):
            status, body = await refused(client, path, json=field | {"stream": stream})
            error = body["error"]
            n = error["n_prompt_tokens"]
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", n_ctx)
            assert f"This model's maximum context length is {n_ctx} tokens" in error["message"]
            assert ContextExceeded.of_request(n, n_ctx).message in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_in_mid_stream(client: Client, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """What fails when the stream has begun is an event of the API's."""

    async def full(*args: Any) -> bytes:
        raise DiskFull("/secret is full")

    monkeypatch.setattr(Task, "final", full)
    body = MESSAGES | {"input": "a", "stream": True}
    async with client.post(path, json=body) as reply:
        text = await reply.text()
    name, _, data = text.removesuffix("\n\n").rpartition("\n\n")[2].rpartition("data: ")
    error = json.loads(data)
    words = DiskFull.stands_for
    assert name == ("" if path == "/v1/chat/completions" else "event: error\n")
    assert error["error"]["message"] == words
    if path == "/v1/messages":
        assert error == {"type": "error", "error": {"type": "api_error", "message": words}}
    if path == "/v1/responses":
        said = {key: error[key] for key in ("type", "code", "message", "param")}
        assert said == {"type": "error", "code": DiskFull.kind, "message": words, "param": None}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_ollamas_shape(client: Client, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """From the body to the middle of a stream: the message and nothing else, in a line of its own."""
    body = MESSAGES | {"model": "m", "prompt": "Once upon a time", "options": {"num_predict": 2}}
    asked: list[tuple[int, str, dict[str, Any]]] = [
        (405, path, {"method": "GET"}),
        (404, "/api/none", {"json": {}}),
        (400, path, {"data": b"{"}),
        (400, path, {"data": b"[]"}),
        (400, path, {"json": body | {"model": ""}}),
        (403, path, {"json": body, "headers": {"Origin": "http://e.org"}}),
    ]
    for status, where, request in asked:
        found, said = await refused(client, where, **request)
        assert (found, set(said)) == (status, {"error"})
        assert isinstance(said["error"], str)

    async def full(*args: Any) -> bytes:
        raise DiskFull("/secret is full")

    monkeypatch.setattr(Task, "final", full)
    async with client.post(path, json=body) as reply:
        assert reply.content_type == "application/x-ndjson"
        *parts, last = [json.loads(line) async for line in reply.content]
    assert not any(part["done"] for part in parts)
    assert last == {"error": DiskFull.stands_for}


def test_llama_servers_errors() -> None:
    """Replies of a llama-server, and replies of a model's process behind a router."""
    said = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    body = json.dumps({"error": said}).encode()
    theirs = {"type": "error", "error": {"type": "overloaded_error", "message": "Loading model"}}
    assert json.loads(reshaped("/v1/messages", body)) == theirs
    for path in ("/completion", "/v1/chat/completions", "/v1/responses"):
        assert json.loads(reshaped(path, body)) == {"error": said}
    event = b"event: error\ndata: " + json.dumps(theirs, separators=(",", ":")).encode() + b"\n\n"
    assert event_of_reply("/v1/messages", json.dumps(theirs).encode()) == event
    assert json.loads(reshaped("/api/chat", body)) == {"error": "Loading model"}
    for text in (b"", b"[1]", b'{"error": 3}', b"<html>"):
        assert reshaped("/v1/messages", text) == text
        assert event_of_reply("/v1/messages", text) == b"data: %s\n\n" % text


async def test_their_own_programs(client: Client) -> None:
    """The packages raise their own errors, with the fields that programs read."""
    url = str(client.make_url("/"))
    long: Any = [{"role": "user", "content": "once upon a time " * 400}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as asked:
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as raised:
                await asked.messages.create(model="m", max_tokens=4, messages=long, stream=stream)
            found: Any = raised.value.body
            assert found["error"]["type"] == "invalid_request_error"
    async with openai.AsyncOpenAI(base_url=url + "v1", api_key="x", max_retries=0) as chat:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refusal:
                await chat.chat.completions.create(model="m", messages=long, stream=stream)
            assert refusal.value.code == "context_length_exceeded"
