"""The command line and environment of a llama-server that somebody else started.

No endpoint says which RoPE overrides or adapters are in force; the operating system does, for
processes of this user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil


@dataclass(frozen=True, slots=True)
class Command:
    """How a llama-server was started."""

    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def command_behind(url: str) -> Command | None:
    """Of the process of this user that listens at `url`; None when it cannot be seen (another
    user's, another machine's, in a container)."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for process in psutil.process_iter(["name"]):
        try:
            if not _listens(process, port):
                continue
            return Command(tuple(process.cmdline()[1:]), process.environ())
        except (psutil.Error, OSError):
            continue
    return None


def _listens(process: psutil.Process, port: int) -> bool:
    name = process.info.get("name") or ""
    if "llama" not in name:  # opening every process's files takes long
        return False
    found = process.net_connections(kind="tcp")
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in found)
