"""/towerd/v1/calibration, and what responses say of approximate reuse."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from towerd.api.shapes import towerd_json

from towerd.api.choice import Choice
from towerd.drift import Drift
from towerd.engine.base import GenerateRequest, Reuse, Started
from towerd.errors import NotSupported

Client = TestClient[web.Request, web.Application]
PATH = "/towerd/v1/calibration"


class Calibrator:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def view(self) -> dict[str, Any]:
        return {"state": "running" if self.asked else "waiting"}

    def request(self, *, again: bool) -> None:
        if len(self.asked) == 2:
            raise NotSupported("nothing to calibrate")
        self.asked.append(again)


@pytest.fixture
def calibrator(service: Any) -> Calibrator:
    service.calibrator = Calibrator()
    found: Calibrator = service.calibrator
    return found


async def test_view_and_request(client: Client, calibrator: Calibrator) -> None:
    async with client.get(PATH) as reply:
        assert await reply.json() == {"calibration": {"state": "waiting"}}
    for body in ({}, {"again": True}):
        async with client.post(PATH, json=body) as reply:
            assert reply.status == 200
            assert await reply.json() == {"calibration": {"state": "running"}}
    assert calibrator.asked == [False, True]
    async with client.post(PATH, json={}) as reply:
        assert reply.status == 501


@pytest.mark.parametrize("body", [{"again": 3}, [], {"again": "yes"}])
async def test_bad_bodies(client: Client, calibrator: Calibrator, body: Any) -> None:
    async with client.post(PATH, json=body) as reply:
        assert reply.status == 400
    assert calibrator.asked == []


async def test_only_the_owner_may_start_it(
    make_client: Callable[..., Awaitable[Client]], calibrator: Calibrator
) -> None:
    client = await make_client(api_keys=(("secret", "alice"),))
    headers = {"Authorization": "Bearer secret"}
    async with client.post(PATH, json={}, headers=headers) as reply:
        assert reply.status == 403
    assert calibrator.asked == []


async def test_engine_without_one(client: Client) -> None:
    async with client.get(PATH) as reply:
        assert reply.status == 501
        assert "embedded" in (await reply.json())["error"]["message"]


def test_responses_tell_the_drift_of_approximate_reuse() -> None:
    exact = Reuse(live=3, warm=7, prefill=2)
    choice = Choice(0, GenerateRequest(np.zeros(12, np.int32)), keep=False)
    choice.started = Started(exact, 12)
    assert "drift" not in towerd_json(choice)
    choice.started = Started(replace(exact, approximate=5, drift=Drift(0.0127, 0.0033)), 12)
    found = towerd_json(choice)
    assert found["drift"] == {"kl": 0.0127, "floor_kl": 0.0033}
    assert found["reuse"]["approximate"] == 5
