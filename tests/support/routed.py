"""What a router of several models says of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import requests
from daemon import Daemon
from waiting import until

MakeRouter = Callable[..., Daemon]
LONG = "Once upon a time there was a little girl named Lily who liked to play in the park. " * 6


def ask(router: Daemon, model: str | None, prompt: Any = "Once", **more: Any) -> requests.Response:
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True, **more}
    if model is not None:
        body["model"] = model
    return requests.post(router.url + "/completion", json=body, timeout=120)


def metric(router: Daemon, name: str) -> float:
    text = requests.get(router.url + "/metrics", timeout=30).text
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[1])


def states(router: Daemon) -> dict[str, str]:
    """The status of every model, by its name."""
    return {each["id"]: each["status"]["value"] for each in router.get("/models")["data"]}


def children(router: Daemon) -> set[int]:
    """The processes of the loaded models: they listen. The one in reserve does not."""
    return {each.pid for each in psutil.Process(router.pid).children() if _listens(each)}


def _listens(process: psutil.Process) -> bool:
    return any("towerd-models-" in each.laddr for each in process.net_connections("unix"))


def suspended_reserve(router: Daemon) -> psutil.Process:
    """The process that the next model is loaded in, which stands still. Before it has become a
    program of its own the router would stand still as well."""

    found: list[psutil.Process] = []

    def is_there() -> bool:
        with suppress(psutil.NoSuchProcess):  # one that was unloaded just now
            loaded, processes = children(router), psutil.Process(router.pid).children()
            own = [each for each in processes if "towerd.router.loading.child" in each.cmdline()]
            found[:] = [each for each in own if each.pid not in loaded]
        return bool(found)

    until(is_there)
    (process,) = found
    process.suspend()
    return process
