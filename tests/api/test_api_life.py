"""The daemon's life cycle: listening before the model is loaded, sockets, an orderly shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from towerd.app.listening import bind_unix

pytestmark = [pytest.mark.model, pytest.mark.slow]


def start(tmp_path: Path, port: int, *flags: str) -> subprocess.Popen[str]:
    """`towerd serve` with the bundled model."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TOWERD_")}
    command = [
        sys.executable,
        "-P",
        "-m",
        "towerd",
        "serve",
        "--port",
        str(port),
        "--store-dir",
        str(tmp_path / "store"),
        "--socket",
        str(tmp_path / "t.sock"),
        "-t",
        "1",
        *flags,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running daemon and its URL."""
    process = start(tmp_path, 0)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("towerd is ready: http://127.0.0.1:"), line
    yield process, line.split()[3]
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_ready_and_stop(daemon: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    """One line says where it is, and three what to do next; the Unix socket is private; SIGTERM ends it
    cleanly."""
    process, url = daemon
    assert process.stdout is not None
    page, clients, agents = (process.stdout.readline() for _ in range(3))
    assert f"page: {url}/" in page
    assert clients == f"  clients: {url}/v1 (Anthropic's: {url})\n"
    assert "towerctl launch claude" in agents
    assert requests.get(page.split()[page.split().index("page:") + 1], timeout=10).ok
    address = requests.get(url + "/towerd/v1/address", timeout=10).json()
    assert address == {"urls": [url], "needs_key": False}
    assert requests.get(url + "/health", timeout=10).json() == {"status": "ok"}
    path = tmp_path / "t.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not path.exists()


def test_running_stream_is_finished(daemon: tuple[subprocess.Popen[str], str]) -> None:
    """SIGTERM takes no new requests, and lets a running stream come to its end."""
    process, url = daemon
    body: dict[str, Any] = {
        "prompt": "Once upon",
        "n_predict": 300,
        "stream": True,
        "ignore_eos": True,
    }
    with requests.post(url + "/completion", json=body, stream=True, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert json.loads(events[-1][6:])["stop"] is True
    assert process.wait(30) == 0


def test_port_in_use(tmp_path: Path) -> None:
    """One sentence and exit code 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(tmp_path, port)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"Port {port} on 127.0.0.1 is in use" in stderr
    assert "Traceback" not in stderr


def test_second_daemon_on_one_socket(
    daemon: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    """A live daemon's socket is not taken over, and the loser does not remove it."""
    other = start(tmp_path, 0, "--store-dir", str(tmp_path / "other"))
    _, stderr = other.communicate(timeout=60)
    assert other.returncode == 1
    assert "another daemon is listening there" in stderr
    assert (tmp_path / "t.sock").exists()


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    """A socket that a killed daemon left is replaced; a regular file is not."""
    path = tmp_path / "s"
    bind_unix(path).close()
    sock = bind_unix(path)
    sock.close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        bind_unix(path)
    assert path.read_text() == "precious"


def test_kill_loses_no_finished_turn(
    daemon: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    """What was answered in full is there after kill -9."""
    process, url = daemon
    body: dict[str, Any] = {"prompt": "Once upon a time", "n_predict": 8}
    headers = {"X-Towerd-Session": "kept"}
    assert requests.post(url + "/completion", json=body, headers=headers, timeout=60).ok
    process.kill()
    process.wait()
    again = start(tmp_path, 0)
    assert again.stdout is not None
    url = again.stdout.readline().split()[3]
    shown = requests.get(url + "/towerd/v1/sessions/kept?text=1", timeout=10).json()
    assert shown["text"].startswith("<s> Once upon a time")
    again.terminate()
    again.communicate()
