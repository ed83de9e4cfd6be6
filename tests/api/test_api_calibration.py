"""/towerd/v1/calibration, and what responses say of approximate reuse."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient

from towerd.api.llama.reuse import towerd_json
from towerd.drift import Drift
from towerd.engine.base import Finish, Reuse, Timings

Client = TestClient[web.Request, web.Application]
PATH = "/towerd/v1/calibration"


async def view(reply: Any) -> dict[str, Any]:
    assert reply.status == 200, await reply.text()
    found: dict[str, Any] = (await reply.json())["calibration"]
    return found


async def test_view_and_request(client: Client) -> None:
    assert (await view(await client.get(PATH)))["state"] == "waiting"
    bodies: tuple[Any, ...] = ({"again": 3}, [], {"again": "yes"})
    for body in bodies:
        async with client.post(PATH, json=body) as reply:
            assert reply.status == 400
    assert (await view(await client.get(PATH)))["state"] == "waiting"
    found = await view(await client.post(PATH, json={"again": True}))
    assert (found["state"], found["fidelity"], found["calibration"]) == ("running", "near", None)


async def test_what_comes_of_it(make_client: Callable[..., Awaitable[Client]]) -> None:
    """Here that the context is too small to measure anything."""
    client = await make_client(ctx_size=256)
    assert (await view(await client.post(PATH)))["state"] == "running"
    found = await view(await client.get(PATH))
    while found["state"] == "running":
        found = await view(await client.get(PATH))
    assert found["state"] == "failed"
    assert "at least 261 tokens" in found["why"]


def test_responses_tell_the_drift_of_approximate_reuse() -> None:
    exact = Reuse(live=3, warm=7, prefill=2)
    finish = Finish("eos", "", (2,), 12, Timings(10, 2, 1.0, 1, 1.0), exact)
    assert "drift" not in towerd_json(finish)
    spoilt = replace(exact, approximate=5, drift=Drift(0.0127, 0.0033))
    found = towerd_json(replace(finish, reuse=spoilt))
    assert found["drift"] == {"kl": 0.0127, "floor_kl": 0.0033}
    assert found["reuse"]["approximate"] == 5
    assert towerd_json(replace(finish, reuse=replace(spoilt, drift=None)))["drift"] == {
        "kl": None,
        "floor_kl": None,
    }
