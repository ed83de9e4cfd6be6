"""Eigenvectors that are found by another process, which waits and ends when it is told to, and is never left
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import psutil
import pytest
from waiting import until

from towerd.system.eigen import EigenFailed, patient_eigh
from towerd.system.process import is_stopped

ASKS = """
import sys
import numpy as np
from towerd.system.eigen import patient_eigh
must_wait = sys.argv[1] == "stopped"
patient_eigh(np.eye(3000) + np.ones((3000, 3000)), lambda: must_wait)
"""
"""Takes many seconds, or for ever."""


class Ended(Exception):
    pass


def below(pid: int) -> list[psutil.Process]:
    """The processes that it started, and those that they did."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_any_stopped(processes: Iterable[psutil.Process]) -> bool:
    return any(is_stopped(each.pid) for each in processes)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(params=["stopped", "running"])
def asking(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for eigenvectors, while the one that finds them is stopped, or runs."""
    process = subprocess.Popen([sys.executable, "-c", ASKS, request.param])
    try:
        until(lambda: len(below(process.pid)) == 2)
        if request.param == "stopped":
            until(lambda: is_any_stopped(below(process.pid)))
        yield process
    finally:
        for each in below(process.pid):
            each.kill()
        process.kill()
        process.wait()


def test_it_is_what_numpy_finds() -> None:
    """Also of a matrix that a pipe does not hold at once."""
    values = np.random.default_rng(0).normal(size=(300, 200))
    matrix = values.T @ values
    asked = iter([True] * 5)
    found, vectors = patient_eigh(matrix, lambda: next(asked, False))
    assert np.allclose(found, np.linalg.eigvalsh(matrix))
    assert np.allclose(vectors * found @ vectors.T, matrix)


def test_it_ends_when_it_is_told_to() -> None:
    """Also while it is stopped. Nothing is left."""
    before, started = set(below(os.getpid())), set[psutil.Process]()

    def check() -> None:
        started.update(set(below(os.getpid())) - before)
        if is_any_stopped(started):
            raise Ended

    with pytest.raises(Ended):
        patient_eigh(np.eye(1200), lambda: True, check)
    assert started
    until(lambda: all(map(is_gone, started)))


def test_it_is_not_left_behind(asking: subprocess.Popen[bytes]) -> None:
    """Whoever asked is killed, and cannot end anything."""
    started = below(asking.pid)
    asking.kill()
    asking.wait()
    until(lambda: all(map(is_gone, started)))


@pytest.mark.parametrize("is_stopped_first", [False, True])
def test_a_process_that_is_killed_gives_no_result(is_stopped_first: bool) -> None:
    """The keeper is killed. Nothing is left of the other."""
    before, started = set(below(os.getpid())), list[psutil.Process]()

    def are_there() -> bool:
        started[:] = [each for each in below(os.getpid()) if each not in before]
        return len(started) == 2 and (not is_stopped_first or is_any_stopped(started))

    def kill() -> None:
        until(are_there)
        keeper = min(started, key=lambda each: each.ppid() != os.getpid())
        os.kill(keeper.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(EigenFailed):
        patient_eigh(np.eye(3000) + np.ones((3000, 3000)), lambda: is_stopped_first)
    thread.join()
    until(lambda: all(map(is_gone, started)))
