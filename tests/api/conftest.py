"""A small service behind the real API, with guards for the event loop."""

from __future__ import annotations

import asyncio
import asyncio.events
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from blockbuster import blockbuster_ctx
from loop_steps import time_steps
from scripted_model import make_scripted_model
from services import EmbeddedService

from towerd.api.http.keys import GATE
from towerd.api.http.limits import Limits
from towerd.app.daemon import build_app
from towerd.app.loop import tune_gc
from towerd.models.bundled import bundled_model
from towerd.service import Service, open_service
from towerd.settings.config import Config

LOOP_MS_MAX = 5.0
CONTROL_MS = 0.3
"""The time of `control_ms` on an idle core (AMD EPYC)."""
_BLOCK = bytes(2 << 20)

Client = TestClient[web.Request, web.Application]
MakeApp = Callable[..., Awaitable[web.Application]]
MakeClient = Callable[..., Awaitable[Client]]


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Any blocking call made from towerd.api on the event loop fails the test."""
    with blockbuster_ctx(scanned_modules=["towerd.api"]):
        yield


def control_ms() -> float:
    """CPU time of some computing, copying and page faults, always the same."""
    began = time.thread_time()
    bytearray(_BLOCK)
    sum(range(10_000))
    return (time.thread_time() - began) * 1e3


class LoopTime:
    """CPU time of the longest single step of any event loop. CPU, not wall: a busy machine must
    not fail a test, and what waits instead of computing is `blockbuster`'s to catch. A busy
    machine's CPU time is longer as well (shared caches, a stolen core): a long step counts as much
    as it exceeds a control in the same moment."""

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self.worst = ""

    async def watch(self, work: Callable[[], Awaitable[None]]) -> None:
        """Assert that no step of `work` takes long, in one of five runs: what the code does it
        does in each, what the machine does (a stolen core, a busy sibling) hardly."""
        for _ in range(5):
            self.worst_ms = 0.0
            await work()
            if self.worst_ms <= LOOP_MS_MAX:
                return
        self.assert_never_blocked()

    def assert_never_blocked(self, limit_ms: float = LOOP_MS_MAX) -> None:
        assert self.worst_ms <= limit_ms, f"{self.worst_ms:.1f} ms in {self.worst}"


@pytest.fixture
def loop_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopTime]:
    """Watch every step of every event loop from here on, with the daemon's own settings of the
    cycle collector."""
    thresholds = gc.get_threshold()
    tune_gc()
    record = LoopTime()

    def told(seconds: float, handle: asyncio.Handle) -> None:
        spent = seconds * 1e3
        if spent > LOOP_MS_MAX:
            spent /= max(1.0, min(control_ms() for _ in range(3)) / CONTROL_MS)
        if spent > record.worst_ms:
            record.worst_ms, record.worst = spent, repr(handle)

    time_steps(monkeypatch, told)
    yield record
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
async def make_app(tmp_path: Path) -> AsyncIterator[MakeApp]:
    """An app in front of a service on this test's own store; keywords change the Config,
    `limits=` the Limits."""
    async with AsyncExitStack() as stack:

        async def make(limits: Limits | None = None, **changes: Any) -> web.Application:
            values: dict[str, Any] = {
                "model": bundled_model(),
                "alias": "story",
                "store_dir": tmp_path / "store",
                "socket": tmp_path / "towerd.sock",
                "port": 0,
                "ctx_size": 512,
                "live_tokens": 2048,
                "live_sequences": 8,
                "parallel": 4,
                "threads": 1,
                "hot_bytes": 1 << 30,
                "warm_bytes": 1 << 30,
            }
            config = Config(**(values | changes))
            service = await stack.enter_async_context(open_service(config))
            return build_app(config, service=service, limits=limits)

        yield make


@pytest.fixture
async def make_client(
    make_app: MakeApp, aiohttp_client: Callable[..., Awaitable[Client]]
) -> MakeClient:
    """A client of such an app."""

    async def make(limits: Limits | None = None, **changes: Any) -> Client:
        return await aiohttp_client(await make_app(limits, **changes))

    return make


@pytest.fixture
async def client(make_client: MakeClient) -> Client:
    return await make_client()


@pytest.fixture
def service(client: Client) -> EmbeddedService:
    """The service behind `client`."""
    return behind(client)


def behind(client: Client) -> EmbeddedService:
    assert client.app is not None
    found = client.app[GATE].open()
    assert isinstance(found, Service)
    return found


@pytest.fixture
def held() -> Callable[[Client], AbstractContextManager[EmbeddedService]]:
    """`with held(client) as service`: the inference thread is blocked inside."""

    @contextmanager
    def hold(client: Client) -> Iterator[EmbeddedService]:
        gate = threading.Event()
        service = behind(client)
        service.engine.scheduler.call(gate.wait)
        try:
            yield service
        finally:
            gate.set()

    return hold


SCRIPT = ("Hel", "lo", "!", "\nY", "ou")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that generates SCRIPT, and supports infill."""
    path = tmp_path_factory.mktemp("models") / "scripted.gguf"
    make_scripted_model(path, SCRIPT, fill_in=True)
    return path


@pytest.fixture
def sse() -> Callable[[str], list[str]]:
    """Splits a server-sent stream into the data of its events."""

    def split(text: str) -> list[str]:
        return [e.removeprefix("data: ") for e in text.split("\n\n") if e.startswith("data: ")]

    return split
