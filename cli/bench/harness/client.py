"""A streaming completion client that times the first token."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import aiohttp

from towerd.errors import TowerdError


@dataclass(slots=True)
class Completion:
    """One streamed /completion as the client saw it."""

    ttft_s: float = 0.0
    last_token_s: float = 0.0
    """When the last event with a token arrived."""
    total_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    top: dict[int, dict[int, float]] = field(default_factory=dict)
    """With `n_probs`, by the place in the reply, from 0: the most probable tokens there, with their
    log-probabilities. A place is missing where a token does not end a character."""
    text: str = ""
    final: dict[str, Any] = field(default_factory=dict)

    @property
    def timings(self) -> dict[str, Any]:
        return dict(self.final.get("timings", {}))


Ask: TypeAlias = Callable[[Sequence[int], int], Awaitable[Completion]]
"""`complete` of one server, called with a prompt's ids and the number of tokens to generate."""


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int] | Mapping[str, Any],
    n_predict: int,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Completion:
    """POST /completion with token ids, or with a text and its media, greedy, ignoring EOS; TTFT is
    from the request to the first data line with a token. Raises TowerdError if the server answers
    with an error."""
    body = {
        "prompt": dict(prompt) if isinstance(prompt, Mapping) else list(prompt),
        "n_predict": n_predict,
        "stream": True,
        "return_tokens": True,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,
        **fields,
    }
    result = Completion()
    data = json.dumps(body).encode()
    started = time.perf_counter()
    async for event in _events(session, url, "/completion", data, headers or {}):
        if event.get("tokens") or not result.ttft_s and event.get("stop"):
            result.last_token_s = time.perf_counter() - started
            result.ttft_s = result.ttft_s or result.last_token_s
        if event.get("stop"):
            result.final = event
        result.tokens += event.get("tokens") or []
        for each in event.get("completion_probabilities") or []:
            place = event["tokens_predicted"] - 1
            result.top[place] = {one["id"]: one["logprob"] for one in each["top_logprobs"]}
    result.total_s = time.perf_counter() - started
    return result


async def chat(
    session: aiohttp.ClientSession,
    url: str,
    messages: Sequence[Mapping[str, Any]],
    n_predict: int,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Completion:
    """POST /v1/chat/completions, greedy, ignoring EOS; the reply's text is in `text`, and TTFT is
    from the request to the first event, which comes with the first token. Raises TowerdError if
    the server answers with an error."""
    body = {
        "messages": list(messages),
        "max_tokens": n_predict,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    result = Completion()
    data = json.dumps(body).encode()
    started = time.perf_counter()
    async for event in _events(session, url, "/v1/chat/completions", data, headers or {}):
        result.ttft_s = result.ttft_s or time.perf_counter() - started
        if "timings" in event:
            result.final = event
        for choice in event["choices"]:
            result.text += choice["delta"].get("content") or ""
    result.total_s = time.perf_counter() - started
    return result


async def _events(
    session: aiohttp.ClientSession, url: str, path: str, data: bytes, headers: Mapping[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed reply. Raises TowerdError."""
    headers = {"Content-Type": "application/json", **headers}
    async with session.post(url + path, data=data, headers=headers) as reply:
        if reply.status != 200:
            raise TowerdError(f"{url} answered {reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise TowerdError(f"{url} failed: {event['error']}")
            yield event


async def daemon_stats(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """All statistics of a daemon; empty for a server that is no towerd."""
    async with session.get(f"{url}/towerd/v1/stats") as reply:
        return dict(await reply.json()) if reply.status == 200 else {}


def new_session() -> aiohttp.ClientSession:
    """A client session without timeouts: a cold prompt may take any time.

    Every request has its own connection: llama-server closes one after a stream."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
    )


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Ask]:
    """Query a server directly, in a session of its own."""
    async with new_session() as session:
        yield partial(complete, session, url)
