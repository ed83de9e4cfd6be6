"""`towerctl top`: a view of a real daemon while requests run, on a terminal and without one."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import Result
from daemon import Daemon
from waiting import until

from towerd.cli.maintenance.top import COLUMNS, frame

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


@contextmanager
def busy(server: Daemon) -> Iterator[None]:
    """One request after the other."""
    ended = threading.Event()

    def ask() -> None:
        body = {"prompt": "Once upon a time", "n_predict": 400, "ignore_eos": True}
        while not ended.is_set():
            server.post("/completion", body)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_once(server: Daemon, ctl: Ctl, ctl_json: CtlJson) -> None:
    """Requests with their tokens, tiers with their sizes, in 100 columns; --json has the same."""
    at = ("--socket", server.socket)
    idle = ctl("top", *at).output
    assert "requests  0 running, 0 waiting" in idle
    assert "slots are idle." in idle
    with busy(server):
        seen: list[str] = []

        def shows_it() -> bool:
            seen.append(ctl("top", "--once", *at).output)
            return "writing" in seen[-1] and "1 running" in seen[-1]

        until(shows_it)
        assert all(len(line) <= COLUMNS for line in seen[-1].splitlines())
        assert {line.split(" ")[0] for line in seen[-1].splitlines()} >= {
            "live",
            "hot",
            "warm",
            "cold",
        }
    view = ctl_json("top", *at)
    assert set(view) == {"stats", "slots", "processes", "at"}
    assert view["processes"] == []  # one model has one
    assert len(view["slots"]) == view["stats"]["n_slots"]


def test_what_changed_between_two_views(server: Daemon, ctl_json: CtlJson) -> None:
    """Evictions since the view before, and tokens a second of the same request."""
    before = ctl_json("top", "--socket", server.socket)
    task = {"id": 0, "is_processing": True, "id_task": 7, "n_prompt_tokens_processed": 30}
    token = [{"n_decoded": 5}]
    before["slots"] = [
        {**task, "n_prompt_tokens": 45, "n_prompt_tokens_cache": 10, "next_token": token}
    ]
    after = {**before, "at": before["at"] + 2.0}
    after["slots"] = [
        {**before["slots"][0], "n_prompt_tokens": 1240, "next_token": [{"n_decoded": 1200}]}
    ]
    tiers = {**before["stats"]["tiers"], "warm_evictions": 1234}
    after["stats"] = {**before["stats"], "tiers": tiers}
    shown = frame(after, before)
    assert any(line.endswith("597.5") and "1,200" in line for line in shown)
    assert any("1,234 +1,234" in line for line in shown)
    other = {**after, "slots": [{**after["slots"][0], "id_task": 8}]}
    assert any(line.endswith("-") and "writing" in line for line in frame(other, before))
    others = frame({**after, "slots": [{"id": 0, "n_ctx": 512, "is_processing": True}]}, before)
    assert others[-1].split() == ["0", "busy"]
    hidden = frame({**after, "slots": None}, None)
    assert "not shown" in hidden[-1]


def test_on_a_terminal(server: Daemon) -> None:
    """It refreshes on the other screen; Ctrl-C ends it and gives the terminal back."""
    main, side = pty.openpty()
    command = [sys.executable, "-c", "from towerd.cli.main import towerctl; towerctl()", "top"]
    where = ["--interval", "0.1", "--socket", str(server.socket)]
    process = subprocess.Popen([*command, *where], stdout=side, stdin=side)
    os.close(side)
    shown = b""
    try:
        while shown.count(b"\x1b[H") < 3:
            shown += os.read(main, 1 << 16)
        process.send_signal(signal.SIGINT)
        while LEAVE not in shown:
            shown += os.read(main, 1 << 16)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert shown.startswith(ENTER)
    assert b"requests  0 running" in shown


def test_without_a_daemon(server: Daemon, ctl: Ctl) -> None:
    server.stop()
    for at in (("--socket", server.socket), ("--store-dir", server.store_dir)):
        said = ctl("top", *at, code=1).stderr
        assert len(said.splitlines()) == 1
        assert "towerd serve" in said


@pytest.mark.parametrize("seconds", ["0", "x"])
def test_bad_intervals(ctl: Ctl, seconds: str) -> None:
    assert "--interval" in ctl("top", "--interval", seconds, code=2).output
