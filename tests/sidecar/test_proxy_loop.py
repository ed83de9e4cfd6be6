"""The pass-through under load: no step of the event loop uses 5 ms of CPU time."""

from __future__ import annotations

import asyncio
import asyncio.events
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import busy_clients
import pytest
from loop_steps import time_steps
from served import served, tuned

from towerd.app.daemon import build_app
from towerd.service import open_service
from towerd.settings.config import Config

STEP_MS_MAX = 5.0
N_ROUNDS_MAX = 3


class LoopWatch:
    """What the steps of this thread's event loops cost."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.worst_ms = 0.0
        self.worst = ""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> LoopWatch:
    """The steps of this thread's loops."""
    watched = LoopWatch()

    def told(seconds: float, handle: asyncio.Handle) -> None:
        spent_ms = seconds * 1e3
        if threading.get_ident() == watched.thread and spent_ms > watched.worst_ms:
            watched.worst_ms, watched.worst = spent_ms, repr(handle)[:300]

    time_steps(monkeypatch, told)
    return watched


@pytest.fixture
async def url(slow_model: Path, llama_server: Path, tmp_path: Path) -> AsyncIterator[str]:
    """A served app in front of a llama-server, with the process tuned as `towerd serve` does."""
    config = Config(
        engine="llama-server",
        model=slow_model,
        store_dir=tmp_path / "store",
        parallel=4,
        socket=tmp_path / "s",
        ctx_size=8192,
        threads=1,
        hot_bytes=1 << 28,
        warm_bytes=1 << 28,
    )
    async with open_service(config) as service:
        with tuned():
            async with served(build_app(config, service=service)) as url:
                yield url


async def test_no_step_takes_long(url: str, watch: LoopWatch) -> None:
    """Streams, restores, big bodies in and out, a dashboard, all at once. A step that does too
    much does so in every round; what a shared core adds to its time hardly comes thrice."""
    paths = ("/v1/chat/completions", "/v1/messages")
    for _ in range(N_ROUNDS_MAX):
        watch.worst_ms = 0.0
        clients = await asyncio.create_subprocess_exec(
            sys.executable, busy_clients.__file__, url, *paths
        )
        assert await clients.wait() == 0
        if watch.worst_ms <= STEP_MS_MAX:
            break
    async with aiohttp.ClientSession() as http, http.get(url + "/towerd/v1/stats") as reply:
        assert (await reply.json())["engine"]["restores"] > 0
    assert watch.worst_ms <= STEP_MS_MAX, f"{watch.worst_ms:.1f} ms in {watch.worst}"
