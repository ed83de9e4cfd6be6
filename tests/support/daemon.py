"""A real `towerd serve` in its own process, on a free port and a store of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests

from towerd.store import Store, latest_row_identity

START_S = 60.0
STOP_S = 30.0
POLL_S = 0.01
_URL = re.compile(r"http://[\w.\[\]:]+:\d+")


class Daemon:
    """`towerd serve --port 0 FLAGS`. Start it, stop it, kill it, start it again: the store
    stays, the port does not."""

    def __init__(self, root: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """`root` takes the store, the socket and one log a start; nothing of the user's is read.
        `flags` come last, so that they win."""
        self.root = root
        self.store_dir = root / "store"
        self.socket = root / "s.sock"
        self.names_socket = True
        """Else it is the default one, which follows from the store."""
        self.flags = flags
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._env = clean_env(root) | dict(env or {})
        self._starts = 0
        root.mkdir(parents=True, exist_ok=True)

    # --- life -----------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start the process and return at once."""
        assert self.process is None, "it runs already"
        self._starts += 1
        self.url = ""
        where = ["--port", "0", "--store-dir", str(self.store_dir)]
        where += ["--socket", str(self.socket)] if self.names_socket else []
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*TOWERD, "serve", *where, *self.flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                cwd=self.root,
            )

    def start(self) -> Daemon:
        """Start the process and wait until it serves."""
        self.spawn()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until /health is ok. Raises AssertionError with the log if it never is."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.is_running, f"towerd ended early:\n{self.log}"
            if self.find_url() and self._is_healthy():
                return
            time.sleep(POLL_S)
        raise AssertionError(f"towerd did not get ready:\n{self.log}")

    def find_url(self) -> str:
        """The URL that the daemon says it listens on; empty while it does not."""
        if not self.url:
            found = _URL.search(self.log)
            self.url = found[0] if found else ""
        return self.url

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._running().send_signal(number)

    def stop(self) -> int:
        """SIGTERM and wait; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL and wait."""
        self.signal(signal.SIGKILL)
        self.wait()

    def kill_both(self) -> None:
        """SIGKILL it and its llama-server at the same moment, as far as two calls allow, and wait."""
        own = psutil.Process(self._running().pid)
        family = [own, *own.children(recursive=True)]
        assert any(each.name() == "llama-server" for each in family)
        for each in family:
            os.kill(each.pid, signal.SIGKILL)
        self.wait()
        assert psutil.wait_procs(family[1:], timeout=STOP_S)[1] == []

    def wait(self) -> int:
        """Wait for the process to end; the exit status."""
        status = self._running().wait(STOP_S)
        self.process = None
        return status

    def __enter__(self) -> Daemon:
        return self if self.process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "it does not run"
        return self.process

    def _is_healthy(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False

    # --- looking ---------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log_path(self) -> Path:
        """Output of the last start."""
        return self.root / f"log-{self._starts}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def get(self, path: str, **kwargs: Any) -> Any:
        """The JSON of a GET; AssertionError unless it is 200."""
        reply = requests.get(self.url + path, timeout=30, **kwargs)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post(self, path: str, body: Any, status: int = 200, **kwargs: Any) -> Any:
        """The JSON of a POST; AssertionError unless it has this status."""
        reply = requests.post(self.url + path, json=body, timeout=60, **kwargs)
        assert reply.status_code == status, reply.text
        return reply.json()

    def complete(self, prompt: Any, n_predict: int = 8, **fields: Any) -> dict[str, Any]:
        """The reply of an unstreamed /completion with its token ids; greedy, no early end."""
        fixed = {"temperature": 0, "ignore_eos": True, "return_tokens": True}
        body = {"prompt": prompt, "n_predict": n_predict, **fixed, **fields}
        reply = self.post("/completion", body)
        assert isinstance(reply, dict)
        return reply

    def session_ids(self, name: str) -> list[int]:
        """Token ids of a session's current branch, asked over HTTP."""
        ids = self.get(f"/towerd/v1/sessions/{name}?ids=1")["ids"]
        assert isinstance(ids, list)
        return ids

    def n_processing(self) -> int:
        """Requests that the engine runs at this moment."""
        return sum(slot["is_processing"] for slot in self.get("/slots"))

    def statuses(self) -> Counter[str]:
        """How many requests since the start had which status; those for /health and /metrics are not
        counted."""
        text = requests.get(self.url + "/metrics", timeout=30).text
        found: Counter[str] = Counter()
        for labels, n in re.findall(r"^towerd_requests_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            values = dict(re.findall(r'(\w+)="(.*?)"', labels))
            if values["route"] not in ("/health", "/metrics"):
                found[values["status"]] += int(float(n))
        return found

    @contextmanager
    def stored(self) -> Iterator[Store]:
        """The store, opened directly; the daemon must not run. Checked on the way in."""
        assert self.process is None, "the daemon owns the store"
        with Store.open(self.store_dir, latest_row_identity) as store:
            store.check_integrity(keys=True)
            report = store.verify()
            assert report.ok, report.problems
            yield store


TOWERD = (sys.executable, "-m", "towerd")


def clean_env(root: Path) -> dict[str, str]:
    """This process's environment without settings of towerd, with the user's directories moved
    below `root`. One thread evaluates: llama.cpp's threads wait for each other without sleeping,
    which takes seconds a step where other tests have the second core."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TOWERD_")}
    env |= {
        name: str(root / name.lower())
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
    }
    env["HOME"] = str(root)
    env["TOWERD_THREADS"] = "1"
    env["TOWERD_RAM_MAX"] = "0"  # else a container's limit, if the tests run in one
    return env


def run_towerd(root: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`towerd FLAGS`, expected to end by itself."""
    return subprocess.run(
        [*TOWERD, *flags],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
        env=clean_env(root) | env,
        cwd=root,
    )


def run_towerctl(daemon: Daemon, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`towerctl ARGS` on a daemon's store or socket, as a person would run it. more: variables of its environment"""
    towerctl = str(Path(sys.executable).with_name("towerctl"))
    env = clean_env(daemon.root) | {
        "TOWERD_STORE_DIR": str(daemon.store_dir),
        "TOWERD_SOCKET": str(daemon.socket),
        **more,
    }
    return subprocess.run(
        [towerctl, *args],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=120,
        cwd=daemon.root,
    )


def wait_until_written(daemon: Daemon) -> None:
    """Rows of everything recorded have reached the disk."""
    deadline = time.monotonic() + START_S
    while True:
        tiers = daemon.get("/towerd/v1/stats")["tiers"]
        segments = daemon.get("/towerd/v1/segments")["segments"]
        if tiers["unwritten_segments"] == 0 and all(each["warm"] for each in segments):
            return
        assert time.monotonic() < deadline, segments
        time.sleep(2 * POLL_S)


def reuse_of(headers: Mapping[str, str]) -> dict[str, int]:
    """X-Towerd-Reuse as numbers."""
    parts = (part.split("=") for part in headers["X-Towerd-Reuse"].split(","))
    return {tier: int(n) for tier, n in parts}
