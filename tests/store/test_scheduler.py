"""Threads that a seed gives turns to: they exclude each other, wait in no real time, and never get stuck unseen."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from scheduler import Scheduler, Stuck, ThreadDied
from simulated_disk import PowerLost
from simulated_threads import threads_on

SEEDS = 40


def run(seed: int, *works: Callable[[], object]) -> list[str]:
    """Run these as threads; returns who had the turns. Raises Stuck or ThreadDied."""
    scheduler = Scheduler(random.Random(seed))
    with threads_on(scheduler):
        try:
            threads = [threading.Thread(target=work, name=work.__name__) for work in works]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except PowerLost:
            pass
        scheduler.finish()
    return scheduler.trace


def in_two_orders() -> tuple[Callable[[], object], Callable[[], object]]:
    """Two threads that take two locks, each in its own order."""
    locks: list[threading.Lock] = []

    def made() -> list[threading.Lock]:
        if not locks:
            locks.extend((threading.Lock(), threading.Lock()))
        return locks

    def upwards() -> None:
        with made()[0], made()[1]:
            pass

    def downwards() -> None:
        with made()[1], made()[0]:
            pass

    return upwards, downwards


def test_two_orders_of_locks_are_found_with_what_each_thread_does() -> None:
    found = []
    for seed in range(SEEDS):
        try:
            run(seed, *in_two_orders())
        except Stuck as stuck:
            found.append(str(stuck))
    assert 0 < len(found) < SEEDS
    assert all("upwards:" in text and "in downwards" in text for text in found)


def test_timed_waits_take_no_time() -> None:
    said: list[float | bool] = []

    def patient() -> None:
        began = time.monotonic()
        said.append(threading.Event().wait(1e6))
        empty: queue.SimpleQueue[int] = queue.SimpleQueue()
        with pytest.raises(queue.Empty):
            empty.get(timeout=1e6)
        time.sleep(1e6)
        said.append(time.monotonic() - began)

    began = time.monotonic()
    run(1, patient)
    assert said[0] is False
    assert said[1] >= 3e6
    assert time.monotonic() - began < 60


def test_an_executor_and_a_queue_lose_nothing() -> None:
    def worker() -> None:
        numbers: queue.Queue[int] = queue.Queue(2)

        def put() -> None:
            for n in range(9):
                numbers.put(n)

        with ThreadPoolExecutor(3, "pool") as pool:
            squares = [pool.submit(pow, n, 2) for n in range(9)]
            putting = pool.submit(put)
            assert [numbers.get() for _ in range(9)] == list(range(9))
            putting.result()
            assert [each.result() for each in squares] == [n * n for n in range(9)]

    for seed in range(SEEDS):
        assert run(seed, worker) == run(seed, worker)


def test_a_thread_that_dies_is_told() -> None:
    def unlucky() -> None:
        raise ValueError("of all things")

    with pytest.raises(ThreadDied, match=r"unlucky died\n(.|\n)*of all things"):
        run(1, unlucky)
