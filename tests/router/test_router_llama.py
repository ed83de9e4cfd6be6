"""The router's own endpoints beside those of a real llama-server router, over the same models."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import clean_env
from routed import MakeRouter
from waiting import until

from towerd.api.llama.unsupported import DISABLED
from towerd.engine.llama_server.process.binary import find_binary, library_env
from towerd.engine.llama_server.process.process import free_port
from towerd.errors import ConfigError

Seen = dict[str, Any]
OWN = frozenset(("args", "preset", "created", "build_info", "info", "meta"))
"""Values that name the program, the time or what the engine made of the settings; that they are there
is compared."""


@pytest.fixture
def rival(tmp_path: Path, models_dir: Path) -> Iterator[str]:
    """The URL of llama-server as a router."""
    try:
        binary = find_binary()
    except ConfigError as error:
        pytest.skip(error.message)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ("--models-dir", str(models_dir), "--port", str(port), "--offline", "-c", "2048")
    env = os.environ | library_env(binary) | clean_env(tmp_path)
    with (tmp_path / "rival.log").open("wb") as log:
        process = subprocess.Popen([str(binary), *flags], stdout=log, stderr=log, env=env)
    try:
        until(lambda: answers(url) or process.poll() is not None)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return requests.get(url + "/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def shape(value: Any) -> Any:
    """A value without what differs between programs."""
    if isinstance(value, dict):
        return {key: type(each) if key in OWN else shape(each) for key, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else value


def life(url: str) -> dict[str, Any]:
    """Everything that is said while a model is loaded and unloaded, and while one cannot be."""
    seen: dict[str, Any] = {}
    events: list[Any] = []
    listening = threading.Event()

    def listen() -> None:
        with requests.get(url + "/models/sse", stream=True, timeout=300) as reply:
            listening.set()
            for line in reply.iter_lines():
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
                    if events[-1]["event"] == "models_reload":
                        return

    def call(name: str, method: str, path: str, body: Any = None) -> None:
        reply = requests.request(method, url + path, json=body, timeout=120)
        seen[name] = (reply.status_code, shape(reply.json()))

    def is_loaded(model: str, state: str) -> Callable[[], bool]:
        def check() -> bool:
            listed = requests.get(url + "/models", timeout=30).json()["data"]
            return any(each["id"] == model and each["status"]["value"] == state for each in listed)

        return check

    thread = threading.Thread(target=listen)
    thread.start()
    assert listening.wait(60)
    call("models", "GET", "/models")
    call("props", "GET", "/props")
    call("unload unknown", "POST", "/models/unload", {"model": "x"})
    call("unload unloaded", "POST", "/models/unload", {"model": "tales"})
    call("no name", "POST", "/completion", {"prompt": "x"})
    call("no name in a GET", "GET", "/slots")
    call("no autoload", "POST", "/completion?autoload=false", {"model": "tales", "prompt": "x"})
    call("load", "POST", "/models/load", {"model": "tales"})
    until(is_loaded("tales", "loaded"))
    call("load again", "POST", "/models/load", {"model": "tales"})
    call("one loaded", "GET", "/models")
    call("unload", "POST", "/models/unload", {"model": "tales"})
    until(is_loaded("tales", "unloaded"))
    call("load junk", "POST", "/models/load", {"model": "junk"})
    until(lambda: any(each["data"].get("exit_code") for each in events if "data" in each))
    call("one failed", "GET", "/models")
    call("reload", "GET", "/models?reload=1")
    thread.join(60)
    seen["events"] = [shape(each) for each in events if not is_progress(each)]
    return seen


def is_progress(event: Any) -> bool:
    """How far a load is; llama-server says it as often as it likes."""
    return "progress" in event.get("data", {})


def test_they_say_the_same(make_router: MakeRouter, rival: str) -> None:
    theirs = life(rival)
    ours = life(make_router().url)
    for name, said in theirs.items():
        assert ours[name] == said, name


def test_tools_and_the_proxy_need_no_model(make_router: MakeRouter, rival: str) -> None:
    """The web UI asks for them before a model is chosen, and takes this answer for "there are none"."""
    ours = make_router().url
    for method, path in DISABLED:
        theirs, said = (requests.request(method, url + path, timeout=60) for url in (rival, ours))
        assert said.status_code == theirs.status_code == 403
        assert said.json()["error"]["type"] == theirs.json()["error"]["type"]
