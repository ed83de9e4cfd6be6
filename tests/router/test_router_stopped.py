"""A model's process that is stopped: its requests end, the others go on, and it comes back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import requests
from daemon import Daemon
from routed import MakeRouter, ask, children
from stopped import stopped
from waiting import until

SOON_S = 20.0
"""Within which a request to a process that is stopped ends."""


def pid_of(router: Daemon, model: str) -> int:
    """The process that has this model loaded."""
    before = children(router)
    assert ask(router, model).status_code == 200
    (pid,) = children(router) - before
    return pid


def test_a_process_that_is_stopped(make_router: MakeRouter) -> None:
    """A stream that runs in it and a request that waits for it get an error, later requests at once; the
    other model answers, and so does this one once it continues."""
    router = make_router()
    pid_of(router, "tales")
    dice = pid_of(router, "dice")
    body: Any = {"model": "dice", "prompt": "Once", "n_predict": 1500, "ignore_eos": True}
    with (
        ThreadPoolExecutor(1) as pool,
        requests.post(
            router.url + "/completion", json=body | {"stream": True}, stream=True, timeout=SOON_S
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        with stopped_between_turns(router, dice):
            began = time.monotonic()
            waiting = pool.submit(ask, router, "dice")
            assert router.get("/health") == {"status": "ok"}
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 503
            reply = waiting.result()
            if dice not in children(router):
                return  # it was killed, as it took the turn when it was stopped: the other test's case
            assert reply.status_code == 503
            assert "dice is stopped" in reply.json()["error"]["message"]
            assert time.monotonic() - began < SOON_S
            began = time.monotonic()
            assert ask(router, "dice").status_code == 503
            assert time.monotonic() - began < 1
    until(lambda: ask(router, "dice").status_code == 200)
    assert dice in children(router)
    assert router.stop() == 0, router.log


@contextmanager
def stopped_between_turns(router: Daemon, pid: int) -> Iterator[None]:
    """A process that stands still inside the block while it has no turn at the store: the other model
    answers, which would otherwise end it."""
    for _ in range(400):
        with stopped(pid):
            if tales_can_write(router):
                yield
                return
    raise AssertionError("it always had the turn")


def test_a_process_that_is_stopped_in_its_turn(make_router: MakeRouter) -> None:
    """All wait for the store while it has the turn: it is killed, and what was acknowledged is there."""
    router = make_router()
    pid_of(router, "tales")
    dice = pid_of(router, "dice")
    ids = list(range(100, 140))
    answer = ask(router, "dice", ids, return_tokens=True, n_predict=4).json()["tokens"]
    known = [*ids, *answer]
    for _ in range(400):
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, router, "dice", [n, *ids], n_predict=1) for n in range(4)]
            process = psutil.Process(dice)
            process.suspend()
            if not tales_can_write(router):
                break
            process.resume()
            for each in asked:
                assert each.result().status_code == 200
    else:
        raise AssertionError("it never had the turn")
    until(lambda: dice not in children(router))
    assert ask(router, "tales", "And then").status_code == 200
    reply = ask(router, "dice", [*known, 150], n_predict=1)
    assert reply.status_code == 200
    path = f"/towerd/v1/sessions/{reply.headers['X-Towerd-Session']}?ids=1&model=dice"
    assert router.get(path)["ids"][: len(known)] == known
    assert router.stop() == 0, router.log


def tales_can_write(router: Daemon) -> bool:
    """Whether the other model has the store within a moment."""
    try:
        body: Any = {"model": "tales", "prompt": "Once", "n_predict": 1}
        requests.post(router.url + "/completion", json=body, timeout=1)
    except requests.ReadTimeout:
        return False
    return True


def test_the_end_while_one_is_stopped(make_router: MakeRouter) -> None:
    """A router leaves in order, whichever of its processes is stopped: a model's, or the one in reserve."""
    router = make_router()
    dice = pid_of(router, "dice")
    until(lambda: len(psutil.Process(router.pid).children()) == 2)
    for each in psutil.Process(router.pid).children():
        each.suspend()
    began = time.monotonic()
    router.signal(signal.SIGTERM)
    assert router.wait() == 0, router.log
    assert time.monotonic() - began < SOON_S
    assert not psutil.pid_exists(dice)
    assert "was killed" not in router.log
