"""An event loop in which nothing waits: a virtual clock, and all that the system decides drawn from a seed.

asyncio promises the order of `call_soon`, so that stays. When a packet arrives, how long a thread or a
connection takes and which of two comes first is the system's choice: each is a timer at a drawn moment.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar

from simulated_processes import OWNER, SimulatedProcess, SimulatedProcessTransport
from simulated_sockets import SimulatedNetwork

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Nothing is ready and nothing will be."""


class SimulatedTask(asyncio.Task[T]):
    """A task whose place in a set does not depend on where it lies in memory."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class VirtualTime:
    """What stands where a loop has its selector: waiting for I/O moves the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.n_steps = 0

    def select(self, timeout: float | None) -> list[object]:
        """Let so many seconds pass. Raises DeadlockError if there is nothing to wait for."""
        if timeout is None:
            raise DeadlockError("nothing is ready, and no timer is set")
        self.n_steps += 1
        self.now += timeout
        return []

    def close(self) -> None:
        """Nothing is open."""


class SimulatedLoop(SimulatedNetwork, asyncio.BaseEventLoop):
    """The loop of one seed, on the thread that runs it."""

    def __init__(self, seed: int) -> None:
        asyncio.BaseEventLoop.__init__(self)
        SimulatedNetwork.__init__(self)
        self.virtual = self._selector = VirtualTime()
        self.seed = seed
        self.failures: list[str] = []
        """What the loop was told that no task has caught."""
        self._n_draws: Counter[str] = Counter()
        self._n_tasks = 0
        self._signals: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._threads = self.chance("thread")
        self.processes: list[SimulatedProcess] = []
        """All that were started, in that order."""
        self.program: Callable[[SimulatedProcess], Coroutine[Any, Any, None]] | None = None
        """What runs in a process."""
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note)

    def chance(self, label: str) -> random.Random:
        """A new source of chance; that of one connection is not moved by what another draws."""
        self._n_draws[label] += 1
        return random.Random(f"{self.seed} {label} {self._n_draws[label]}")

    def time(self) -> float:
        """Virtual seconds."""
        return self.virtual.now

    def simulate(self, main: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine to its end. Raises what it raises, and DeadlockError with the stacks of all tasks
        if it takes longer than so many virtual seconds, or waits for what will not come."""

        def stop(_: object = None) -> None:
            self.stop()

        task = self.create_task(main)
        task.add_done_callback(stop)
        limit = self.call_later(limit_s, stop)
        try:
            self.run_forever()
        except DeadlockError as error:
            raise DeadlockError(f"{error}\n{self.stacks()}") from None
        finally:
            task.remove_done_callback(stop)
            limit.cancel()
        if not task.done():
            raise DeadlockError(f"not at its end after {limit_s} virtual seconds\n{self.stacks()}")
        return task.result()

    def stacks(self) -> str:
        """Where every task is that has not ended."""
        text = io.StringIO()
        for task in sorted(asyncio.all_tasks(self), key=hash):
            task.print_stack(limit=6, file=text)
        return text.getvalue()

    def end(self) -> None:
        """Cancel what is left, and close."""
        while left := asyncio.all_tasks(self):
            for task in sorted(left, key=hash):
                task.cancel()
            self.run_until_complete(asyncio.wait(left, timeout=1.0))
        self.close()

    # ---- processes ----------------------------------------------------------------------------

    def owner(self) -> SimulatedProcess | None:
        return OWNER.get()

    async def _make_subprocess_transport(
        self, *args: Any, **kwargs: Any
    ) -> SimulatedProcessTransport:
        """Start a process, in a drawn time."""
        chance = self.chance("fork")
        await asyncio.sleep(chance.choice((0.0, 1e-3, chance.uniform(0, 0.1))))
        waiter = self.create_future()
        kwargs["waiter"] = waiter
        transport = SimulatedProcessTransport(self, *args, **kwargs)
        try:
            await waiter
        except BaseException:  # as asyncio's own loops
            transport.close()
            raise
        return transport

    # ---- what a loop does ---------------------------------------------------------------------

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._n_tasks += 1
        SimulatedTask.number = self._n_tasks  # a set may ask while the task is being made
        task: SimulatedTask[Any] = SimulatedTask(work, loop=loop, context=context)
        task.number = self._n_tasks
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is not None:
            owner.tasks.add(task)
            task.add_done_callback(owner.tasks.discard)
        return task

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context['message']}: {error!r}")

    def _process_events(self, event_list: list[object]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Nothing sleeps."""

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call a function at a drawn moment, whose result is known at a later one."""
        future: asyncio.Future[T] = self.create_future()

        def settle(set_it: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set_it(value)

        def call() -> None:
            took_s = _thread_s(self._threads)
            try:
                result = func(*args)
            except Exception as error:
                self.call_later(took_s, settle, future.set_exception, error)
            else:
                self.call_later(took_s, settle, future.set_result, result)

        self.call_later(_thread_s(self._threads), call)
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._signals[sig] = callback, args

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signals.pop(sig, None) is not None

    def signal(self, sig: int) -> None:
        """The process under test gets a signal."""
        callback, args = self._signals[sig]
        self.call_soon(callback, *args)


def _thread_s(chance: random.Random) -> float:
    """How long a step of a thread takes."""
    return chance.choice((0.0, 1e-5, chance.uniform(0, 1e-3), chance.uniform(0, 0.05)))


@contextmanager
def simulated_loop(seed: int) -> Iterator[SimulatedLoop]:
    """A loop of its own, closed at the end with what still runs on it."""
    loop = SimulatedLoop(seed)
    try:
        yield loop
    finally:
        loop.end()
