"""Several tenants: what one does, and how fast it is, shows to it and to the operator alone, on either
engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from daemon import Daemon
from waiting import until

MakeDaemon = Callable[..., Daemon]
KEYS = ("--api-key", "ann:sk-ann", "--api-key", "bob:sk-bob")
ANN, BOB, MONITOR = ({"Authorization": f"Bearer sk-{name}"} for name in ("ann", "bob", "monitor"))
SHOWN_OF_OTHERS = {"id", "n_ctx", "speculative", "is_processing"}
LONG: dict[str, Any] = {"prompt": "Once", "n_predict": 30_000, "ignore_eos": True, "stream": True}


def owner_get(daemon: Daemon, path: str) -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(daemon.socket))) as client:
        return client.get("http://towerd" + path, timeout=30)


def busy(slots: list[dict[str, Any]]) -> int:
    return sum(slot["is_processing"] for slot in slots)


def running(daemon: Daemon, key: dict[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.get("/towerd/v1/requests", headers=key)["running"]
    return found


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_activity_is_each_tenants_own(
    make_sidecar: MakeDaemon, slow_model: Path, engine: str
) -> None:
    """While Ann's request runs and after it; with a monitor's key, which has no tenant's name."""
    flags = ("--engine", engine, "-m", str(slow_model), "-c", "32768", "--live-tokens", "65536")
    with make_sidecar(*flags, *KEYS, "--api-key", "sk-monitor") as daemon:
        for path in ("/metrics", "/towerd/v1/stats"):
            for key in (ANN, BOB):
                reply = requests.get(daemon.url + path, headers=key, timeout=30)
                assert reply.status_code == 403
                assert "what all tenants do" in reply.json()["error"]["message"]
            assert requests.get(daemon.url + path, headers=MONITOR, timeout=30).status_code == 200
            assert owner_get(daemon, path).status_code == 200
        url = daemon.url + "/completion"
        began = time.monotonic()
        with requests.post(url, json=LONG, headers=ANN, stream=True, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            until(lambda: busy(daemon.get("/slots", headers=ANN)) == 1)
            for caller, n_busy in ((MONITOR, 1), (BOB, 0)):
                seen = daemon.get("/slots", headers=caller)
                assert busy(seen) == n_busy
                assert all(slot.keys() == SHOWN_OF_OTHERS for slot in seen)
                assert len(seen) == 2
            for seen in (owner_get(daemon, "/slots").json(), daemon.get("/slots", headers=ANN)):
                (mine,) = (slot["params"] for slot in seen if slot["is_processing"])
                assert mine["n_predict"] == LONG["n_predict"]
            found: list[Any] = []

            def is_fast() -> bool:
                found[:] = running(daemon, ANN)
                return found[0]["tokens_per_second"] is not None

            until(is_fast)
            (own,) = found
            reply_s = (own["generated"] - 1) / own["tokens_per_second"]
            assert 0 < own["ttft_ms"] / 1e3 < time.monotonic() - began - reply_s
            n = own["prompt_evaluated"] + own["generated"]
            assert own["tokens"] in (n - 1, n)  # the newest one is not evaluated yet
            assert running(daemon, BOB) == []
        until(lambda: busy(daemon.get("/slots", headers=MONITOR)) == 0)
        for caller in (MONITOR, BOB):
            seen = daemon.get("/slots", headers=caller)
            assert all(slot.keys() == SHOWN_OF_OTHERS for slot in seen)
        own = daemon.get("/slots", headers=ANN)
        assert not any("id_task" in slot for slot in own)
        daemon.post("/completion", {"prompt": "Once", "n_predict": 3}, headers=MONITOR)
        seen = daemon.get("/slots", headers=MONITOR)
        (mine,) = (slot for slot in seen if "params" in slot)
        assert (mine["params"]["n_predict"], "id_task" in mine) == (3, True)
