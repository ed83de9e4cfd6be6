"""What the operating system says about a llama-server that towerd did not start.

No endpoint says which RoPE overrides are in force, nor whether the model's file was replaced since
it was loaded. The operating system does, for processes of this user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil


@dataclass(frozen=True, slots=True)
class Command:
    """How a llama-server was started."""

    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0
    """The process; 0: it is not known yet."""


def command_behind(url: str) -> Command | None:
    """The command of this user's process that listens at `url`; None when it cannot be seen
    (another user's, on another machine, in a container)."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for process in psutil.process_iter(["name"]):
        try:
            if not _listens(process, port):
                continue
            return Command(tuple(process.cmdline()[1:]), process.environ(), process.pid)
        except (psutil.Error, OSError):
            continue
    return None


def may_have_loaded_another(pid: int, path: Path) -> bool:
    """Whether the process may have loaded another file than the one now at `path`: it was changed
    after the process began, and the process does not map it."""
    try:
        if path.stat().st_ctime <= psutil.Process(pid).create_time():
            return False
        maps = Path(f"/proc/{pid}/maps").read_text()
        return not any(line.endswith(f" {path.resolve()}") for line in maps.splitlines())
    except FileNotFoundError:
        return True
    except (psutil.Error, OSError):
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    name = process.info.get("name") or ""
    if "llama" not in name:  # opening every process's files takes long
        return False
    found = process.net_connections(kind="tcp")
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in found)
