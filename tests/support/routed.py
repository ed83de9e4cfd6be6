"""What a router of several models says of them."""

from __future__ import annotations

from collections.abc import Callable

import psutil
from daemon import Daemon

MakeRouter = Callable[..., Daemon]


def states(router: Daemon) -> dict[str, str]:
    """The status of every model, by its name."""
    return {each["id"]: each["status"]["value"] for each in router.get("/models")["data"]}


def children(router: Daemon) -> set[int]:
    """The processes of the loaded models: they listen. The one in reserve does not."""
    return {each.pid for each in psutil.Process(router.pid).children() if _listens(each)}


def _listens(process: psutil.Process) -> bool:
    return any("towerd-models-" in each.laddr for each in process.net_connections("unix"))
