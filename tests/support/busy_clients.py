"""Clients that use everything at once; run as a program, so that they share no interpreter with
the daemon under test: `python busy_clients.py URL [CHAT_PATH...]`."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp

N_STREAMS = 8
TEXT = "A girl saw a red ball in the sea. " * (2_000_000 // 34)


async def stream(http: aiohttp.ClientSession, url: str, seed: int) -> None:
    """A streamed chat of two turns with a long prompt and probabilities; each turn commits."""
    chance = random.Random(seed)
    ids = [chance.randrange(300, 500) for _ in range(600)]
    for _ in range(2):
        body = {
            "prompt": ids,
            "n_predict": 60,
            "stream": True,
            "n_probs": 10,
            "ignore_eos": True,
            "return_tokens": True,
        }
        async with http.post(url + "/completion", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: "):
                    ids += json.loads(line[6:])["tokens"]
    assert len(ids) == 720


async def post_big(http: aiohttp.ClientSession, url: str, body: Any, status: int) -> Any:
    data = io.BytesIO(json.dumps(body).encode())
    async with http.post(url, data=data) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def big_texts(http: aiohttp.ClientSession, url: str, chat_paths: Sequence[str]) -> None:
    """2 MB to tokenize, to detokenize, and as a prompt that does not fit."""
    tokens = (await post_big(http, url + "/tokenize", {"content": TEXT}, 200))["tokens"]
    assert len(tokens) > 100_000
    found = await post_big(http, url + "/detokenize", {"tokens": tokens}, 200)
    assert len(found["content"]) >= len(TEXT) - 1
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 5}
    for body in ({"prompt": TEXT}, {"prompt": tokens}):
        await post_big(http, url + "/completion", body, 400)
    for path in chat_paths:
        await post_big(http, url + path, chat, 400)


async def looks(http: aiohttp.ClientSession, url: str) -> None:
    """All requests of a dashboard, and maintenance of the store."""
    for _ in range(4):
        for path in (
            "/metrics",
            "/slots",
            "/props",
            "/towerd/v1/stats",
            "/towerd/v1/sessions",
            "/towerd/v1/segments?limit=1000",
            "/towerd/v1/trie?limit=1000",
        ):
            async with http.get(url + path) as reply:
                assert reply.status == 200, await reply.text()
        async with http.post(url + "/towerd/v1/verify", json={}) as reply:
            assert reply.status == 200, await reply.text()
        await asyncio.sleep(0.1)


async def main(url: str, *chat_paths: str) -> None:
    """All of it at once; long chats go to `chat_paths`."""
    async with aiohttp.ClientSession() as http:
        streams = [stream(http, url, seed) for seed in range(N_STREAMS)]
        await asyncio.gather(*streams, big_texts(http, url, chat_paths), looks(http, url))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *(sys.argv[2:] or ["/v1/chat/completions"])))
