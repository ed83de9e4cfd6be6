"""The two servers under test as child processes: towerd itself and the real llama-server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from towerd.engine.llama_server.process.binary import find_binary, library_env
from towerd.engine.llama_server.process.process import free_port
from towerd.errors import TowerdError

_START_S_MAX = 300.0
_STOP_S_MAX = 60.0


class ServerProcess:
    """A server on a free loopback port; a context manager. `stop` and `start` to restart it."""

    def __init__(self, command: Sequence[str], *, port: int, env: dict[str, str]) -> None:
        self.command = list(command)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log", delete=False)

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def start(self) -> float:
        """Start and wait for /health; returns the seconds it took. Raises TowerdError."""
        started = time.monotonic()
        self._process = subprocess.Popen(
            self.command, stdout=self._log, stderr=subprocess.STDOUT, env=self._env
        )
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() - started > _START_S_MAX:
                self.stop()
                raise TowerdError(f"{self.command[0]} did not start: {self.log_tail()}")
            time.sleep(0.02)
        return time.monotonic() - started

    def stop(self, with_signal: int = signal.SIGTERM) -> None:
        """Send the signal and wait; kill the process if it does not stop."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(with_signal)
        try:
            self._process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    @property
    def pid(self) -> int | None:
        """The process's number; None unless it runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def rss_bytes(self) -> int:
        """Resident memory of the running process and its children."""
        import psutil

        assert self._process is not None
        process = psutil.Process(self._process.pid)
        return sum(int(each.memory_info().rss) for each in (process, *process.children()))

    def log_tail(self) -> str:
        """The last lines of its log."""
        return Path(self._log.name).read_text(errors="replace")[-500:].strip()

    def exit_code(self) -> int | None:
        """The exit code of the process, or minus the signal that ended it; None while it runs."""
        return None if self._process is None else self._process.poll()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def towerd_server(model: Path, store: Path, *flags: str) -> ServerProcess:
    """`towerd serve` on a store of its own."""
    return towerd_process("-m", str(model), store=store, flags=flags)


def towerd_process(
    *served: str, store: Path, flags: Sequence[str], program: Sequence[str] = ("-m", "towerd")
) -> ServerProcess:
    """`towerd serve` of what the words `served` name. program: what Python runs, if not towerd itself."""
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith("TOWERD_")}
    where = ("--store-dir", str(store), "--socket", str(store.parent / "bench.sock"))
    command = (sys.executable, "-P", *program, "serve", *served, "--port", str(port), *where)
    return ServerProcess((*command, "--log-level", "warning", *flags), port=port, env=env)


def llama_server(model: Path, *flags: str) -> ServerProcess:
    """llama-server with its defaults, except for the given flags."""
    return llama_process("-m", str(model), *flags)


def llama_process(*flags: str) -> ServerProcess:
    """llama-server with these words."""
    binary, port = find_binary(), free_port()
    env = os.environ | library_env(binary)
    command = [str(binary), "--host", "127.0.0.1", "--port", str(port), *flags]
    return ServerProcess(command, port=port, env=env)
