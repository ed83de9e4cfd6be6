"""--sleep-idle-seconds, on both engines: what is loaded, what is answered meanwhile, and what survives."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from daemon import START_S, Daemon

from towerd.models.bundled import bundled_model

KEYS = ("--api-key", "ann:ka")
ANN = {"Authorization": "Bearer ka"}


@pytest.fixture(params=["embedded", "llama-server"])
def sleeper(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., tuple[Daemon, Path]]]:
    """`sleeper(*flags)`: a daemon that sleeps after a second, and its model, which is a file of its own."""
    made: list[Daemon] = []

    def make(*flags: str) -> tuple[Daemon, Path]:
        if request.param == "llama-server":
            request.getfixturevalue("llama_server")
        model = tmp_path / "own.gguf"
        shutil.copy(bundled_model(), model)
        words = ("-m", str(model), "--engine", request.param, "--sleep-idle-seconds", "1", *flags)
        made.append(Daemon(tmp_path / "d", *words))
        return made[0].start(), model

    yield make
    for each in made:
        if each.process is not None:
            each.kill()


def wait_asleep(daemon: Daemon, **kwargs: object) -> None:
    deadline = time.monotonic() + START_S
    while not daemon.get("/props", **kwargs)["is_sleeping"]:
        assert time.monotonic() < deadline, daemon.log
        time.sleep(0.05)


def holds(daemon: Daemon, model: Path) -> bool:
    """Whether the daemon, or a process below it, has the file of the model mapped or open."""
    own = psutil.Process(daemon.pid)
    found = False
    for process in (own, *own.children(recursive=True)):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (OSError, psutil.Error):
            continue
        found |= str(model) in maps
    return found


pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc")


def test_it_sleeps_and_wakes(sleeper: Callable[..., tuple[Daemon, Path]]) -> None:
    """The model's memory is given back; what was said before is used after."""
    daemon, model = sleeper()
    said = daemon.complete("Once upon a time there was a fox", 16)
    deadline = time.monotonic() + START_S
    wait_asleep(daemon)
    while holds(daemon, model):
        assert time.monotonic() < deadline, daemon.log
        time.sleep(0.05)
    assert daemon.get("/health") == {"status": "ok"}
    assert daemon.get("/v1/models")["data"][0]["id"] == "own.gguf"
    stats = daemon.get("/towerd/v1/stats")
    assert stats["is_sleeping"] is True
    text = requests.get(daemon.url + "/metrics", timeout=30).text
    assert "llamacpp:tokens_predicted_total 16" in text
    assert requests.get(daemon.url + "/nope.txt", timeout=30).status_code in (200, 404)
    with ThreadPoolExecutor(4) as pool:  # all of them wait for the model
        prompt = "Once upon a time there was a fox" + said["content"]
        replies = list(pool.map(lambda _: daemon.complete(prompt, 4), range(4)))
    assert len({reply["content"] for reply in replies}) == 1
    assert all(reply["timings"]["cache_n"] > 16 for reply in replies)
    assert "the model is loaded again" in daemon.log
    (session,) = daemon.get("/towerd/v1/sessions")["sessions"]
    assert session["n_tokens"] > 20


def test_a_model_that_is_gone(sleeper: Callable[..., tuple[Daemon, Path]]) -> None:
    """Who waits for it hears so, without its path; it is tried again when it is back."""
    daemon, model = sleeper()
    wait_asleep(daemon)
    model.rename(model.with_suffix(".away"))
    reply = requests.post(daemon.url + "/completion", json={"prompt": "a"}, timeout=60)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == (
        "The model could not be loaded again; the daemon's log says why"
    )
    assert str(model) in daemon.log
    assert daemon.get("/props")["is_sleeping"] is True
    model.with_suffix(".away").rename(model)
    assert daemon.complete("Once", 2)["tokens_predicted"] == 2


def test_only_callers_wake_it(sleeper: Callable[..., tuple[Daemon, Path]]) -> None:
    """A wrong key, a path that is not there and reading the state leave it asleep; SIGTERM ends it."""
    daemon, model = sleeper(*KEYS)
    wait_asleep(daemon, headers=ANN)
    url = daemon.url
    for key, status in (("wrong", 401), ("", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        reply = requests.post(url + "/completion", json={}, headers=headers, timeout=30)
        assert reply.status_code == status
    for path in ("/health", "/props", "/v1/models", "/metrics", "/towerd/", "/api/version"):
        assert requests.get(url + path, headers=ANN, timeout=30).status_code == 200
    (listed,) = daemon.get("/api/tags", headers=ANN)["models"]
    assert daemon.get("/api/ps", headers=ANN) == {"models": []}
    shown = daemon.post("/api/show", {"model": listed["name"]}, headers=ANN)
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["template"] == daemon.get("/props", headers=ANN)["chat_template"]
    for method, path, status in (
        ("POST", "copy", 400),
        ("DELETE", "delete", 400),
        ("POST", "blobs/sha256:0", 400),
        ("HEAD", "blobs/sha256:0", 404),
    ):
        asked: Any = {"headers": ANN, "json": {"model": "m"}, "timeout": 30}
        assert requests.request(method, f"{url}/api/{path}", **asked).status_code == status
    assert daemon.get("/props", headers=ANN)["is_sleeping"] is True
    assert "is loaded again" not in daemon.log
    assert daemon.stop() == 0
    with daemon.stored():
        pass
