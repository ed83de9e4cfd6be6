"""Completions: shapes, streams, choices, reuse headers, cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientTimeout, web
from aiohttp.test_utils import TestClient

from towerd.errors import TowerdError, Unavailable

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]
Split = Callable[[str], list[str]]


async def post(client: Client, path: str, body: Any, **headers: str) -> Any:
    async with client.post(path, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def stream(client: Client, sse: Split, path: str, body: dict[str, Any]) -> list[str]:
    async with client.post(path, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        return sse(await reply.text())


async def test_native_completion(client: Client, service: Any) -> None:
    """/completion answers the text, the counts and where the prompt came from."""
    async with client.post("/completion", json={"prompt": "abcdef", "n_predict": 3}) as reply:
        body = await reply.json()
        headers = reply.headers
    assert body["content"] == "Hel"
    assert body["tokens_evaluated"] == 7
    assert body["stop_type"] == "limit"
    assert body["prompt"] == "<s>abcdef"
    assert body["timings"]["cache_n"] == 3
    assert headers["X-Towerd-Reuse"] == "live=1,hot=1,warm=1,prefill=4"
    assert headers["X-Towerd-Session"] == service.store.sessions()[0].id
    assert headers["Content-Type"] == "application/json; charset=utf-8"


async def test_sampling_that_the_model_recommends(client: Client, service: Any) -> None:
    """Its metadata is the default, as in llama-server; what the request says wins."""
    info = service.engine.info
    keys = {"temp": "0.25", "top_k": "7", "min_p": "much", "sequence": "top_k;infill;temperature"}
    keys = {f"general.sampling.{key}": value for key, value in keys.items()}
    service.engine.info = replace(info, metadata=keys)
    asked = await post(client, "/completion", {"prompt": "a", "n_predict": 1, "top_k": 9})
    found = asked["generation_settings"]
    assert (found["temperature"], found["top_k"], found["samplers"]) == (
        0.25, 9, ["top_k", "temperature"],
    )  # fmt: skip
    assert found["min_p"] == pytest.approx(0.05)
    async with client.get("/props") as reply:
        said = (await reply.json())["default_generation_settings"]["params"]
    assert (said["temperature"], said["top_k"]) == (0.25, 7)


async def test_chat_completion(client: Client) -> None:
    """/v1/chat/completions answers OpenAI's object with usage."""
    body = await post(
        client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}
    )
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello!\nYou"}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")


async def test_native_stream(client: Client, sse: Split) -> None:
    """A native stream ends with the closing object, without OpenAI's end mark."""
    events = await stream(client, sse, "/completion", {"prompt": "abc", "n_predict": 2})
    chunks = [json.loads(event) for event in events]
    assert [chunk["content"] for chunk in chunks] == ["H", "e", ""]
    assert [chunk["stop"] for chunk in chunks] == [False, False, True]
    assert chunks[-1]["towerd"]["reuse"] == {"live": 1, "hot": 1, "warm": 1, "prefill": 1}


async def test_chat_stream(client: Client, sse: Split) -> None:
    """A chat stream: role, texts, reason, usage on request, end mark."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    events = await stream(client, sse, "/v1/chat/completions", body)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["prompt_progress"]["total"] == len("user: Hi\n") + 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    role = {"role": "assistant", "content": None}
    assert deltas == [role, role, {"content": "H"}, {"content": "e"}, {}]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-1]["timings"]["predicted_n"] == 2
    assert chunks[-1]["towerd"]["session"]


async def test_stream_tells_reuse_in_its_headers(client: Client) -> None:
    """The headers wait for the evaluated prompt, so that they can say what was reused."""
    async with client.post("/completion", json={"prompt": "abc", "stream": True}) as reply:
        assert reply.headers["X-Towerd-Reuse"] == "live=1,hot=1,warm=1,prefill=1"
        await reply.read()


async def test_silent_stream_is_pinged(make_client: MakeClient, service: Any) -> None:
    """A stream with nothing to say yet gets its headers and a comment after the interval."""
    client = await make_client()
    service.sessions.gate = asyncio.Event()
    body = {"prompt": "abc", "stream": True, "sse_ping_interval": 1}
    async with client.post("/completion", json=body) as reply:
        assert await reply.content.readany() == b":\n\n"
        service.sessions.gate.set()
        assert b'"stop":true' in await reply.read()


async def test_choices(client: Client, service: Any) -> None:
    """n choices of each prompt, seeds counted up, usage of all."""
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 1, "seed": 7}
    reply = await post(client, "/v1/completions", body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["completion_tokens"] == 4
    assert reply["usage"]["prompt_tokens"] == 6
    assert sorted(request.sampling.seed for request in service.sessions.seen) == [7, 7, 8, 8]


async def test_choices_streamed(client: Client, sse: Split) -> None:
    """Streamed choices carry their index; every one has its closing chunk."""
    body = {"messages": [{"role": "user", "content": "x"}], "n": 3, "max_tokens": 1}
    events = await stream(client, sse, "/v1/chat/completions", body)
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]


async def test_several_prompts_natively(client: Client) -> None:
    """A list of prompts is a list of replies, cut down to response_fields."""
    fields = ["index", "tokens_evaluated", "generation_settings/n_predict", "absent"]
    body = {"prompt": ["a", "bc"], "n_predict": 1, "response_fields": fields}
    assert await post(client, "/completion", body) == [
        {"index": 0, "tokens_evaluated": 2, "generation_settings/n_predict": 1},
        {"index": 1, "tokens_evaluated": 3, "generation_settings/n_predict": 1},
    ]


async def test_return_tokens_and_probs(client: Client) -> None:
    """return_tokens lists the ids, n_probs the alternatives of each."""
    body = {"prompt": "a", "n_predict": 2, "return_tokens": True, "n_probs": 2}
    reply = await post(client, "/completion", body)
    assert reply["tokens"] == list(b"He")
    first = reply["completion_probabilities"][0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("H", [72], -0.5)
    assert [top["id"] for top in first["top_logprobs"]] == [0, 1]


async def test_chat_logprobs(client: Client, service: Any) -> None:
    """OpenAI's logprobs and top_logprobs, streamed or not."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 3,
    }
    reply = await post(client, "/v1/chat/completions", body)
    assert len(reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    await post(client, "/v1/chat/completions", {**body, "top_logprobs": None})
    assert service.sessions.seen[-1].sampling.n_probs == 20


async def test_post_sampling_probs(client: Client) -> None:
    """post_sampling_probs turns logprobs into probabilities."""
    body = {"prompt": "a", "n_predict": 1, "n_probs": 1, "post_sampling_probs": True}
    token = (await post(client, "/completion", body))["completion_probabilities"][0]
    assert token["prob"] == pytest.approx(0.6065, abs=1e-3)
    assert len(token["top_probs"]) == 1


async def test_timings_per_token(client: Client, sse: Split) -> None:
    """timings_per_token adds running figures to every chunk."""
    body = {"prompt": "abc", "n_predict": 2, "timings_per_token": True}
    chunks = [json.loads(e) for e in await stream(client, sse, "/completion", body)]
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2, 2]
    assert chunks[0]["timings"]["cache_n"] == 3


async def test_session_header(client: Client, service: Any) -> None:
    """X-Towerd-Session names the session, within bounds."""
    body = {"prompt": "a", "n_predict": 1}
    await post(client, "/completion", body, **{"X-Towerd-Session": "my chat"})
    assert service.sessions.seen[-1].session == "my chat"
    assert service.store.sessions()[0].id == "my chat"
    for bad in ("x" * 129, "a\tb"):
        headers = {"X-Towerd-Session": bad}
        async with client.post("/completion", json=body, headers=headers) as reply:
            assert reply.status == 400


async def test_error_before_the_first_event(client: Client, service: Any) -> None:
    """What fails before the stream begins is an ordinary error reply."""
    service.sessions.error = Unavailable("The queue is full")
    async with client.post("/completion", json={"prompt": "a", "stream": True}) as reply:
        assert reply.status == 503
        assert (await reply.json())["error"]["message"] == "The queue is full"


async def test_error_in_mid_stream(client: Client, service: Any, sse: Split) -> None:
    """What fails later arrives as an error event and ends the stream."""
    service.sessions.error, service.sessions.error_after = TowerdError("decode failed"), 2
    events = await stream(client, sse, "/v1/completions", {"prompt": "a"})
    assert json.loads(events[-1])["error"]["message"] == "decode failed"


async def test_unexpected_error_is_not_shown(client: Client, service: Any, sse: Split) -> None:
    """A bug's text goes to the log, not to the client."""
    service.sessions.error, service.sessions.error_after = RuntimeError("secret"), 2
    events = await stream(client, sse, "/v1/completions", {"prompt": "a"})
    assert "secret" not in events[-1]
    assert json.loads(events[-1])["error"]["type"] == "server_error"


@pytest.mark.parametrize("streamed", [True, False])
async def test_disconnect_closes_the_run(client: Client, service: Any, streamed: bool) -> None:
    """A client that leaves cancels its request, streamed or not."""
    service.sessions.reply, service.sessions.delay_s = "x" * 10_000, 0.01
    body = {"prompt": "a", "stream": streamed}
    if streamed:
        reply = await client.post("/completion", json=body)
        await reply.content.readany()
        reply.close()
    else:
        with pytest.raises(TimeoutError):
            await client.post("/completion", json=body, timeout=ClientTimeout(total=0.2))
    async with asyncio.timeout(10):
        await service.sessions.idle.wait()
    assert service.sessions.produced < 10_000
