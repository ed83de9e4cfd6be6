"""How long a model stays loaded: which requests say so, whose word counts, and what waiting for it costs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from waiting import until_async

from towerd.api.http.gate import ServiceGate
from towerd.api.http.keep_alive import KeepAlive, generates
from towerd.api.http.keys import CONFIG, GATE
from towerd.api.llama import completion, embeddings
from towerd.api.llama.task import RUNNING
from towerd.app.routes import ROUTES
from towerd.app.sleep import Sleeper
from towerd.router.router import PASSED_POST
from towerd.settings.config import Config

OTHERS = {completion.post_control}
OLLAMA = {"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"}


def test_what_generates() -> None:
    """Every route of the handlers that do, and no other."""
    wanted = {
        route.path
        for route in ROUTES
        if route.handler.__module__ in (completion.__name__, embeddings.__name__)
        and route.handler not in OTHERS
    } | OLLAMA
    paths = {route.path for route in ROUTES} | set(PASSED_POST)
    found = {path for path in paths if generates(make_mocked_request("POST", path))}
    assert found == wanted | {"/towerd/v1/sessions/{id}/chat"}
    assert not any(generates(make_mocked_request("GET", path)) for path in paths)


@pytest.mark.parametrize(("order", "wanted"), [((1, 2), 7.0), ((2, 1), 7.0), ((1,), 5.0)])
def test_the_request_that_began_last_counts(order: tuple[int, ...], wanted: float) -> None:
    """However late an earlier one is accepted; one that is not does not count."""
    said = KeepAlive()
    assert [said.begin(), said.begin()] == [1, 2]
    for number in order:
        said.say(number, {1: 5.0, 2: 7.0}[number])
    assert said.seconds == wanted
    said.forget()
    assert said.seconds is None


class WatchedGate(ServiceGate):
    """Counts how often it is asked whether the model is used."""

    n_looks = 0

    @property
    def is_used(self) -> bool:
        self.n_looks += 1
        return super().is_used


async def test_a_use_is_waited_for_once() -> None:
    """However short the time is that the model stays loaded behind it."""
    gate, stopping = WatchedGate(), asyncio.Event()
    app = web.Application()
    app[CONFIG], app[GATE], app[RUNNING] = Config(), gate, {}
    async with AsyncExitStack() as opened:
        sleeper = Sleeper(app, opened, _none, stopping)  # type: ignore[arg-type]
        async with gate.used() as number:
            gate.keep_alive(number, 1e-6)
            serving = asyncio.create_task(sleeper.serve())
            await until_async(lambda: gate.n_looks > 0)
            for _ in range(2000):
                await asyncio.sleep(0)
            assert gate.n_looks < 5
            stopping.set()
            await serving


async def _none() -> AsyncExitStack:
    raise AssertionError("it is awake")
