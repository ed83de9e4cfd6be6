"""A llama-server that is stopped: what waits for it ends with an error, and it comes back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import requests
from daemon import Daemon
from stopped import stopped
from waiting import until

from towerd.cli.bench.harness.servers import llama_server as llama_server_alone

MakeDaemon = Callable[..., Daemon]
SOON_S = 20.0
"""Within which a request to a llama-server that is stopped ends."""
LONG: Any = {"prompt": "Once upon a time", "n_predict": 900, "ignore_eos": True, "temperature": 0}
SHORT: Any = LONG | {"n_predict": 4}


def llama_server_of(daemon: Daemon) -> int:
    (child,) = psutil.Process(daemon.pid).children(recursive=True)
    return child.pid


def listening_on(port: str) -> int:
    """The llama-server of this port, which the test started."""
    (found,) = (each.pid for each in psutil.Process().children() if port in each.cmdline())
    return found


def ask(daemon: Daemon, body: Any = SHORT, **options: Any) -> requests.Response:
    return requests.post(daemon.url + "/completion", json=body, timeout=SOON_S, **options)


def check_refused(daemon: Daemon, pid: int) -> None:
    """While the process is stopped, a stream that runs, a request that waits and /health end."""
    with (
        ThreadPoolExecutor(2) as pool,
        ask(daemon, LONG | {"stream": True}, stream=True) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        with stopped(pid):
            waiting = pool.submit(ask, daemon)
            health = pool.submit(requests.get, daemon.url + "/health", timeout=SOON_S)
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 503
            for each in (waiting, health):
                assert each.result().status_code == 503
            began = time.monotonic()
            reply = ask(daemon)
            assert reply.status_code == 503
            assert "llama-server is stopped" in reply.json()["error"]["message"]
            assert daemon.get("/towerd/v1/sessions")["sessions"]
            assert time.monotonic() - began < 1


def test_one_of_ours(make_sidecar: MakeDaemon, slow_model: Path) -> None:
    """It is not started again: it continues, and what it was asked before goes on from the store."""
    with make_sidecar("-m", str(slow_model)) as daemon:
        expected = ask(daemon).json()["content"]
        pid = llama_server_of(daemon)
        check_refused(daemon, pid)
        until(lambda: ask(daemon).status_code == 200)
        assert ask(daemon).json()["content"] == expected
        assert llama_server_of(daemon) == pid
        assert daemon.stop() == 0, daemon.log


def test_the_end_while_it_is_stopped(make_sidecar: MakeDaemon, slow_model: Path) -> None:
    """It is continued first, so that it ends in order and what only its slots hold is stored."""
    with make_sidecar("-m", str(slow_model)) as daemon:
        ask(daemon, LONG | {"n_predict": 64})
        with stopped(llama_server_of(daemon)):
            began = time.monotonic()
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0, daemon.log
            assert time.monotonic() - began < SOON_S
        daemon.start()
        reply = ask(daemon, LONG | {"n_predict": 64})
        assert reply.headers["X-Towerd-Reuse"].partition("prefill=")[2] == "1"


def test_one_that_was_attached(llama_server: Path, tmp_path: Path, slow_model: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    flags = ("-c", "1024", "-np", "2", "-t", "1", "--slot-save-path", str(slots))
    with llama_server_alone(slow_model, *flags, "-kvu") as server:
        daemon = Daemon(tmp_path / "d", "--upstream", server.url, "--slot-dir", str(slots))
        with daemon:
            assert ask(daemon).status_code == 200
            check_refused(daemon, listening_on(server.url.rpartition(":")[2]))
            until(lambda: ask(daemon).status_code == 200)
            assert daemon.stop() == 0, daemon.log
