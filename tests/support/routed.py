"""What a router of several models says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import requests
from daemon import Daemon

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
