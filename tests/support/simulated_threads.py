"""Locks, events, queues and threads of a simulation, which stand in for those of Python inside a block."""

from __future__ import annotations

import concurrent.futures
import fcntl
import queue
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

from scheduler import Baton, Scheduler

CORES = 3
_LOOKS_AGAIN_S = 0.5
"""Time between two looks at a file's lock."""
T = TypeVar("T")


class SimulatedLock:
    """As `threading.Lock`; of those who wait any may be next."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_taken = False
        self._waiters: list[Baton] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock.acquire`."""
        scheduler = self._scheduler
        scheduler.point()
        until = None if timeout < 0 else scheduler.now_s + timeout
        while self._is_taken and not scheduler.is_over:
            left = None if until is None else until - scheduler.now_s
            if not blocking or (left is not None and left <= 0):
                return False
            self.wait_turn(left)
        self._is_taken = True
        return True

    def wait_turn(self, timeout_s: float | None = None) -> None:
        """Wait until it is released, or so long."""
        me = self._scheduler.running
        self._waiters.append(me)
        try:
            self._scheduler.block(timeout_s)
        finally:
            if me in self._waiters:
                self._waiters.remove(me)

    def release(self) -> None:
        """See `threading.Lock.release`."""
        self.let_go()
        if self._scheduler.error is None:
            self._scheduler.point()

    def let_go(self) -> int:
        """Release it without letting another thread run yet; returns how often it was taken."""
        if not self._is_taken and self._scheduler.error is None:
            raise RuntimeError("release unlocked lock")
        self._is_taken = False
        waiters, self._waiters = self._waiters, []
        for each in waiters:
            self._scheduler.wake(each)
        return 1

    def take_back(self, n: int) -> None:
        """Take it as often as it was."""
        self.acquire()

    def locked(self) -> bool:
        """See `threading.Lock.locked`."""
        return self._is_taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedRLock(SimulatedLock):
    """As `threading.RLock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: Baton | None = None
        self._n = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.RLock.acquire`."""
        if self._owner is not self._scheduler.running and not super().acquire(blocking, timeout):
            return False
        self._owner = self._scheduler.running
        self._n += 1
        return True

    def release(self) -> None:
        """See `threading.RLock.release`."""
        if self._owner is not self._scheduler.running and self._scheduler.error is None:
            raise RuntimeError("cannot release un-acquired lock")
        self._n -= 1
        if self._n == 0:
            self._owner = None
            super().release()

    def let_go(self) -> int:
        """See SimulatedLock.let_go."""
        n, self._n, self._owner = self._n, 0, None
        super().let_go()
        return n

    def take_back(self, n: int) -> None:
        """See SimulatedLock.take_back."""
        self.acquire()
        self._n = n


class SimulatedCondition:
    """As `threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: SimulatedLock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = SimulatedRLock(scheduler) if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._sleepers: deque[Baton] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition.wait`."""
        n, me = self._lock.let_go(), self._scheduler.running
        self._sleepers.append(me)
        try:
            return self._scheduler.block(timeout)
        finally:
            if me in self._sleepers:
                self._sleepers.remove(me)
            self._lock.take_back(n)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """See `threading.Condition.wait_for`."""
        until = None if timeout is None else self._scheduler.now_s + timeout
        while not (found := predicate()):
            left = None if until is None else until - self._scheduler.now_s
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        """See `threading.Condition.notify`."""
        for _ in range(min(n, len(self._sleepers))):
            self._scheduler.wake(self._sleepers.popleft())

    def notify_all(self) -> None:
        """See `threading.Condition.notify_all`."""
        self.notify(len(self._sleepers))


class SimulatedEvent:
    """As `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._sleepers: list[Baton] = []

    def is_set(self) -> bool:
        """See `threading.Event.is_set`."""
        return self._is_set

    def set(self) -> None:
        """See `threading.Event.set`."""
        self._is_set = True
        for each in self._sleepers:
            self._scheduler.wake(each)
        self._sleepers.clear()
        self._scheduler.point()

    def clear(self) -> None:
        """See `threading.Event.clear`."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Event.wait`."""
        self._scheduler.point()
        me = self._scheduler.running
        if not self._is_set:
            self._sleepers.append(me)
            try:
                self._scheduler.block(timeout)
            finally:
                if me in self._sleepers:
                    self._sleepers.remove(me)
        return self._is_set


class SimulatedSemaphore:
    """As `threading.Semaphore`."""

    def __init__(self, scheduler: Scheduler, value: int = 1) -> None:
        self._changed = SimulatedCondition(scheduler, SimulatedLock(scheduler))
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """See `threading.Semaphore.acquire`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._value > 0, timeout if blocking else 0.0):
                return False
            self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        """See `threading.Semaphore.release`."""
        with self._changed:
            self._value += n
            self._changed.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedQueue:
    """As `queue.SimpleQueue`. An executor that is freed puts something into its queue at whatever time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._sleepers: list[Baton] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """See `queue.SimpleQueue.put`."""
        self._items.append(item)
        if self._scheduler.error is None:
            if self._sleepers:
                self._scheduler.wake(self._sleepers.pop(0))
            self._scheduler.point()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See `queue.SimpleQueue.get`."""
        scheduler = self._scheduler
        scheduler.point()
        until = None if timeout is None else scheduler.now_s + timeout
        while not self._items:
            left = None if until is None else until - scheduler.now_s
            if not block or scheduler.is_over or (left is not None and left <= 0):
                raise queue.Empty
            me = scheduler.running
            self._sleepers.append(me)
            try:
                scheduler.block(left)
            finally:
                if me in self._sleepers:
                    self._sleepers.remove(me)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """See `queue.SimpleQueue.get_nowait`."""
        return self.get(block=False)

    def empty(self) -> bool:
        """See `queue.SimpleQueue.empty`."""
        return not self._items

    def qsize(self) -> int:
        """See `queue.SimpleQueue.qsize`."""
        return len(self._items)


class SimulatedThread:
    """As `threading.Thread`."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._number = next(scheduler.numbers)
        self._work = partial(target or (lambda: None), *args, **(kwargs or {}))
        self.name = str(name or getattr(target, "__name__", "thread"))
        self.daemon = bool(daemon)
        self._baton: Baton | None = None

    def __hash__(self) -> int:
        return self._number  # sets of threads have the same order each time

    def start(self) -> None:
        """See `threading.Thread.start`."""
        self._baton = self._scheduler.start(self.name, self._work)

    def join(self, timeout: float | None = None) -> None:
        """See `threading.Thread.join`."""
        if self._baton is not None:
            self._scheduler.join(self._baton, timeout)

    def is_alive(self) -> bool:
        """See `threading.Thread.is_alive`."""
        return self._baton is not None and not self._baton.is_over


class NumberedFuture(Future[Any]):
    """A future whose place in a set is the same each time."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.number = next(scheduler.numbers)

    def __hash__(self) -> int:
        return self.number


def done_without_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that awaits nothing but `asyncio.to_thread`, inside `threads_on`."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("it waits for an event loop")


@contextmanager
def file_locks_on(scheduler: Scheduler) -> Iterator[None]:
    """Of threads that wait for a file's lock inside the block, others run meanwhile."""
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        while True:
            try:
                real(fd, operation | (operation & fcntl.LOCK_EX and fcntl.LOCK_NB))
                return
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    raise
                scheduler.block(_LOOKS_AGAIN_S)

    with patch.object(fcntl, "flock", flock):
        yield


@contextmanager
def threads_on(scheduler: Scheduler) -> Iterator[Executor]:
    """What Python's modules offer for threads and time is the scheduler's, inside the block. What an event loop
    has done by a thread is done by one of the executor that this gives, and waited for."""
    made = {
        "Lock": SimulatedLock,
        "RLock": SimulatedRLock,
        "Condition": SimulatedCondition,
        "Event": SimulatedEvent,
        "Semaphore": SimulatedSemaphore,
        "Thread": SimulatedThread,
    }
    exchanged: list[tuple[str, Any]] = [
        (f"threading.{name}", partial(kind, scheduler)) for name, kind in made.items()
    ]
    exchanged += [
        ("queue.SimpleQueue", partial(SimulatedQueue, scheduler)),
        ("queue.time", scheduler.monotonic),
        ("time.monotonic", scheduler.monotonic),
        ("time.perf_counter", scheduler.monotonic),
        ("time.sleep", scheduler.sleep),
        ("os.cpu_count", lambda: CORES),
        ("os.setpriority", lambda *_: None),
        ("concurrent.futures._base.Future", partial(NumberedFuture, scheduler)),
        ("concurrent.futures.thread._global_shutdown_lock", SimulatedLock(scheduler)),
        ("concurrent.futures.thread._threads_queues", {}),
    ]
    with ExitStack() as stack:
        for name, value in exchanged:
            stack.enter_context(patch(name, value))
        stack.enter_context(patch("concurrent.futures._base.id", _number_of, create=True))
        executor = concurrent.futures.ThreadPoolExecutor(CORES + 4, "to_thread")

        async def to_thread(work: Callable[..., T], /, *args: Any, **more: Any) -> T:
            return executor.submit(work, *args, **more).result()

        stack.enter_context(patch("asyncio.to_thread", to_thread))
        yield executor


def _number_of(each: object) -> int:
    return each.number if isinstance(each, NumberedFuture) else id(each)
