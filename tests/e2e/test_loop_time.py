"""The real application under load: no step of the event loop takes 5 ms."""

from __future__ import annotations

import asyncio
import asyncio.events
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import busy_clients
import pytest
from loop_steps import time_steps
from served import served, tuned

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.app.daemon import build_app
from towerd.service import open_service
from towerd.settings.config import Config

STEP_MS_MAX = 5.0
BEAT_S = 0.001
N_ROUNDS_MAX = 5
HELD_MS_MAX = 100.0


@dataclass
class LoopWatch:
    """What the steps of this thread's event loops cost."""

    thread: int = field(default_factory=threading.get_ident)
    n_steps: int = 0
    worst_ms: float = 0.0
    worst: str = ""
    lags_ms: list[float] = field(default_factory=list)

    def record(self, spent_s: float, handle: object) -> None:
        self.n_steps += 1
        if spent_s * 1e3 > self.worst_ms:
            self.worst_ms, self.worst = spent_s * 1e3, repr(handle)[:300]

    async def beat(self) -> None:
        """Note how late a timer runs, for ever."""
        while True:
            due = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.lags_ms.append((time.perf_counter() - due) * 1e3)


@dataclass(frozen=True)
class Round:
    """What clients met: how late a timer ran, and the step that took longest."""

    lag_ms: float
    worst_lag_ms: float
    worst_step_ms: float
    worst_step: str

    @property
    def is_quick(self) -> bool:
        return (
            self.lag_ms < STEP_MS_MAX
            and self.worst_step_ms <= STEP_MS_MAX
            and self.worst_lag_ms < HELD_MS_MAX
        )


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> LoopWatch:
    """The steps of this thread's loops."""
    watched = LoopWatch()

    def told(seconds: float, handle: asyncio.Handle) -> None:
        if threading.get_ident() == watched.thread:
            watched.record(seconds, handle)

    time_steps(monkeypatch, told)
    return watched


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A served app over a real engine, with the process tuned as `towerd serve` does it."""
    model = tmp_path / "tiny.gguf"
    make_random_gguf(model, replace(PRESETS["tiny"], n_layer=2))
    config = Config(
        model=model,
        store_dir=tmp_path / "store",
        socket=tmp_path / "s",
        ctx_size=2048,
        live_tokens=16384,
        threads=1,
        retention="none",
        hot_bytes=1 << 28,
        warm_bytes=1 << 28,
    )
    async with open_service(config) as service:
        with tuned():
            async with served(build_app(config, service=service)) as url:
                yield url


async def run_clients(url: str) -> None:
    """A process of clients, to its end."""
    process = await asyncio.create_subprocess_exec(sys.executable, busy_clients.__file__, url)
    assert await process.wait() == 0


async def test_no_step_takes_long(url: str, watch: LoopWatch) -> None:
    """Eight streams, 2 MB texts, commits and scrapes at once: no callback uses more than 5 ms
    of the loop's thread."""
    beat = asyncio.create_task(watch.beat())
    rounds: list[Round] = []
    # What the code does it does in every round. What the machine does, such as to take the core
    # away from its guest, which counts as the thread's time, it hardly does in all of them. A
    # worker that keeps the interpreter stops the loop as well.
    while not any(each.is_quick for each in rounds):
        assert len(rounds) < N_ROUNDS_MAX, rounds
        watch.lags_ms.clear()
        watch.worst_ms = 0.0
        await run_clients(url)
        lags_ms = watch.lags_ms
        rounds.append(Round(statistics.median(lags_ms), max(lags_ms), watch.worst_ms, watch.worst))
    beat.cancel()
    assert watch.n_steps > 500
