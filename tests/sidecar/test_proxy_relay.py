"""Streams past the interpreter: what is left to the event loop is the beginning and the end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from served import served

from towerd.api import proxy_relay
from towerd.app import build_app
from towerd.config import Config
from towerd.kernels import dispatch
from towerd.kernels.relay import Marks, Relayed, relay
from towerd.sidecar import open_sidecar

N_TOKENS = 300
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Once"}),
    ("/v1/completions", {"prompt": "Once"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": N_TOKENS}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
]


@pytest.fixture
async def url(slow_model: Path, llama_server: Path, tmp_path: Path) -> AsyncIterator[str]:
    """A served app in front of a llama-server."""
    config = Config(
        engine="llama-server", model=slow_model, store_dir=tmp_path / "store", parallel=2,
        socket=tmp_path / "s", ctx_size=4096, threads=1, hot_bytes=1 << 28, warm_bytes=1 << 28,
    )  # fmt: skip
    async with open_sidecar(config) as service:
        async with served(build_app(config, service=service)) as url:
            yield url


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What goes past the event loop, each time that it is asked for."""
    found: list[bytes] = []

    def watched(
        up: int, down: int, cancel: int, marks: Marks, bytes_max: int, is_chunked: bool
    ) -> Relayed:
        what = relay(up, down, cancel, marks, bytes_max, is_chunked)
        found.append(what.passed)
        return what

    monkeypatch.setattr(proxy_relay, "relay", watched)
    return found


async def stream(url: str, path: str, body: dict[str, Any]) -> bytes:
    """A whole one, as it comes."""
    asked = {"stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": N_TOKENS, **body}
    async with aiohttp.ClientSession() as http, http.post(url + path, json=asked) as reply:
        assert reply.status == 200
        return await reply.read()


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
async def test_all_but_the_ends(
    url: str, passed: list[bytes], path: str, body: dict[str, Any]
) -> None:
    """Of every dialect a third at least, even where what is to be loaded at the first requests
    and a busy machine delay it; and the order stays."""
    await stream(url, path, body)
    passed.clear()
    text = await stream(url, path, body)
    n_passed = sum(piece.count(b"data: ") for piece in passed)
    assert N_TOKENS / 3 < n_passed < text.count(b"data: ")
    at = 0
    for piece in passed:
        at = text.index(piece, at) + len(piece)


@pytest.mark.parametrize("how", ["reference", "no room", "no descriptors", "small parts"])
async def test_the_same_however_it_goes(
    url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """By the interpreter, through the event loop, or in turn."""
    body = {"prompt": "Once", "id_slot": 0, "cache_prompt": False}
    first = tokens(await stream(url, "/completion", body))
    assert len(first) == N_TOKENS
    if how == "reference":
        monkeypatch.setenv(dispatch.ENV, how)
    elif how == "no room":
        monkeypatch.setattr(proxy_relay, "RELAYS_MAX", 0)
    elif how == "no descriptors":
        monkeypatch.setattr(proxy_relay, "own_descriptor", refused)
    else:
        monkeypatch.setattr(proxy_relay, "PASSED_BYTES_MAX", 1000)
    assert tokens(await stream(url, "/completion", body)) == first


async def test_no_stream_waits_for_the_thread_of_another(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that begin in the same round of the loop included."""
    n_before: list[int] = []
    run = proxy_relay.Relays.run

    async def watched(relays: proxy_relay.Relays, work: Callable[[], Relayed]) -> Relayed:
        n_before.append(relays._n_busy)
        return await run(relays, work)

    monkeypatch.setattr(proxy_relay.Relays, "run", watched)
    monkeypatch.setattr(proxy_relay, "RELAYS_MAX", 1)
    monkeypatch.setattr(proxy_relay, "PASSED_BYTES_MAX", 500)
    asked = [stream(url, "/completion", {"prompt": prompt}) for prompt in ("Once", "Twice")]
    assert [len(tokens(text)) for text in await asyncio.gather(*asked)] == [N_TOKENS] * 2
    assert set(n_before) == {0}


def refused(transport: object) -> int:
    """As of a process that has as many descriptors as it may."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def tokens(text: bytes) -> list[int]:
    return [
        token
        for line in text.splitlines()
        if line.startswith(b"data: {")
        for token in json.loads(line[6:])["tokens"]
    ]
