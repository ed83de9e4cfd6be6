"""Threads of which one runs at a time, and a seed draws which: real ones, with a baton that is handed on."""

from __future__ import annotations

import inspect
import random
import traceback
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable
from itertools import count
from types import FrameType

from simulated_disk import PowerLost

JUMPS_MAX = 2000
"""So many timed waits in a row may end without any progress; then threads wait for what never comes."""
_SWITCHES = (0.02, 0.1, 0.3)
_PREEMPTED = (0.0, 0.002, 0.02)
_PREEMPTED_S = (1e-3, 100.0)
_HURRY = (0.005, 0.05, 0.2)
_TICK_S = 1e-6
_STACK_MAX = 12


class Stuck(AssertionError):
    """Threads wait for each other, or for what never comes."""


class ThreadDied(AssertionError):
    """A thread ended with an exception."""


class Baton:
    """One thread, and its turn."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.turn: LockType = allocate_lock()
        self.turn.acquire()
        self.deadline_s: float | None = None
        self.is_woken = self.is_over = False
        self.joiners: list[Baton] = []
        self.frame: FrameType | None = None
        """Where it stands while it has no turn."""

    def stack(self) -> str:
        """Its name and what it does."""
        every = [] if self.frame is None else traceback.extract_stack(self.frame)
        lines = traceback.format_list(every[-_STACK_MAX:])
        return f"{self.name}:\n{''.join(lines)}"


class Scheduler:
    """The threads of one simulation. The thread that makes it is the first and has the baton; all methods are
    for the thread that has it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.error: BaseException | None = None
        """Why all threads end: PowerLost, or a failure."""
        self.is_over = False
        """All other threads have ended: locks exclude no thread any more."""
        self.was_finished = False
        """They ended by themselves."""
        self.numbers = count(1)
        """Of what would have another place in a set each time."""
        self.trace: list[str] = []
        """The names of the threads in the order of their turns."""
        self.main = self.running = Baton(0, "main")
        self._switches = rng.choice(_SWITCHES)
        """How often another thread has the next turn."""
        self._preempted = rng.choice(_PREEMPTED)
        """How often a thread has none for long."""
        self._hurry = rng.choice(_HURRY)
        """How often a timed wait ends although other threads could run."""
        self._ready: list[Baton] = []
        self._waiting: list[Baton] = []
        self._all: list[Baton] = [self.main]
        self._n_jumps = 0

    # --- time -----------------------------------------------------------------------------

    def monotonic(self) -> float:
        """Seconds, as `time.monotonic`."""
        self.now_s += _TICK_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`."""
        self.block(seconds)

    def progress(self) -> None:
        """Something came about: nothing is stuck."""
        self._n_jumps = 0

    # --- turns ----------------------------------------------------------------------------

    def point(self) -> None:
        """Another thread may run here. Raises PowerLost if all of them end."""
        if self.is_over:
            return
        self._check()
        if not self._ready and not self._waiting:
            return
        if self._ready and self.rng.random() < self._preempted:
            self.block(self.rng.choice(_PREEMPTED_S))
        elif self.rng.random() < self._switches:
            me = self.running
            self._ready.append(me)
            self._hand_to(self._chosen(), me)

    def block(self, timeout_s: float | None = None) -> bool:
        """Wait until `wake`, or so long; returns whether it was woken. Raises PowerLost if all threads end."""
        if self.is_over:
            return False
        self._check()
        me = self.running
        me.deadline_s = None if timeout_s is None else self.now_s + max(0.0, timeout_s)
        me.is_woken = False
        self._waiting.append(me)
        try:
            self._hand_to(self._chosen(), me)
        finally:
            me.deadline_s = None
        return me.is_woken

    def wake(self, baton: Baton) -> None:
        """End a wait; nothing if it has ended."""
        if baton in self._waiting:
            self._waiting.remove(baton)
            baton.is_woken = True
            self._ready.append(baton)

    def _check(self) -> None:
        if self.error is not None and not self.is_over:
            raise PowerLost

    def _chosen(self) -> Baton:
        """The thread that runs next, which is then neither ready nor waiting."""
        timed = [each for each in self._waiting if each.deadline_s is not None]
        if timed and (not self._ready or self.rng.random() < self._hurry):
            first = min(timed, key=lambda each: (each.deadline_s, each.number))
            assert first.deadline_s is not None
            self.now_s = max(self.now_s, first.deadline_s)
            self._n_jumps += 1
            if self._n_jumps > JUMPS_MAX:
                self.end(Stuck(f"nothing comes about any more\n{self.stacks()}"))
                raise PowerLost
            self._waiting.remove(first)
            return first
        if not self._ready:
            self.end(Stuck(f"all threads wait for each other\n{self.stacks()}"))
            raise PowerLost
        return self._ready.pop(self.rng.randrange(len(self._ready)))

    def _hand_to(self, other: Baton, me: Baton) -> None:
        if other is me:
            return
        me.frame = inspect.currentframe()
        self._give(other)
        me.turn.acquire()
        me.frame = None
        self._check()

    def _give(self, other: Baton) -> None:
        self.running = other
        self.trace.append(other.name)
        other.turn.release()

    # --- threads --------------------------------------------------------------------------

    def start(self, name: str, work: Callable[[], object]) -> Baton:
        """A new thread, which is ready to run."""
        self._check()
        baton = Baton(len(self._all), name)
        self._all.append(baton)
        self._ready.append(baton)
        start_new_thread(self._run, (baton, work))
        self.point()
        return baton

    def join(self, baton: Baton, timeout_s: float | None = None) -> None:
        """As `Thread.join`."""
        if not baton.is_over and not self.is_over:
            me = self.running
            baton.joiners.append(me)
            try:
                self.block(timeout_s)
            finally:
                if me in baton.joiners:
                    baton.joiners.remove(me)

    def alive(self) -> list[Baton]:
        """The threads that have not ended, without the first one."""
        return [each for each in self._all if not each.is_over and each is not self.main]

    def stacks(self) -> str:
        """What each thread does."""
        self.running.frame = inspect.currentframe()
        found = "\n".join(each.stack() for each in self._all if not each.is_over)
        self.running.frame = None
        return found

    def _run(self, baton: Baton, work: Callable[[], object]) -> None:
        baton.turn.acquire()
        try:
            if self.error is None:
                work()
        except PowerLost:
            pass
        except BaseException:
            text = traceback.format_exc(limit=-_STACK_MAX)
            self.end(ThreadDied(f"{baton.name} died\n{text}"))
        self._leave(baton)

    def _leave(self, baton: Baton) -> None:
        baton.is_over = True
        for each in list(baton.joiners):
            self.wake(each)
        if self.error is None:
            try:
                self._give(self._chosen())
                return
            except PowerLost:
                pass
        self._give(self.main)

    # --- the end --------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """All threads end at what they do next, because of the first error."""
        if self.error is None:
            self.error = error

    def finish(self) -> None:
        """End every other thread. For the first one, which alone runs from now on; raises a failure that
        was found."""
        was_wanted, left = self.error is None, self.alive()
        self.was_finished |= was_wanted and not self.is_over
        if was_wanted:
            self.error = PowerLost()
        for each in left:
            if not each.is_over:
                self._give(each)
                self.main.turn.acquire()
        self.running, self.is_over = self.main, True
        if was_wanted and left:
            raise Stuck(f"threads are left: {', '.join(each.name for each in left)}")
        if isinstance(self.error, Stuck | ThreadDied):
            raise self.error
