"""A streaming completion client that times the first token."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from towerd.errors import TowerdError


@dataclass(slots=True)
class Completion:
    """One streamed /completion as the client saw it."""

    ttft_s: float = 0.0
    last_token_s: float = 0.0
    """When the last event with a token came."""
    total_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)

    @property
    def timings(self) -> dict[str, Any]:
        return dict(self.final.get("timings", {}))


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    n_predict: int,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Completion:
    """POST /completion with token ids, greedy, ignoring EOS; TTFT is from request in to the
    first data line with a token. Raises TowerdError when the server answers with an error."""
    body = {
        "prompt": list(prompt),
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
    headers = {"Content-Type": "application/json", **(headers or {})}
    async with session.post(f"{url}/completion", data=data, headers=headers) as reply:
        if reply.status != 200:
            raise TowerdError(f"{url} answered {reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise TowerdError(f"{url} failed: {event['error']}")
            if event.get("tokens") or not result.ttft_s and event.get("stop"):
                result.last_token_s = time.perf_counter() - started
                result.ttft_s = result.ttft_s or result.last_token_s
            if event.get("stop"):
                result.final = event
            result.tokens += event.get("tokens") or []
    result.total_s = time.perf_counter() - started
    return result


def new_session() -> aiohttp.ClientSession:
    """A client session without time-outs: a cold prompt takes as long as it takes.

    Every request has its own connection: llama-server closes one after a stream."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
    )
