"""Processes that are tasks of a simulated loop, with the pipes, signals and end of real ones."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from simulated_sockets import SimulatedServer, SimulatedTransport

if TYPE_CHECKING:
    from simulated_loop import SimulatedLoop

OWNER: ContextVar[SimulatedProcess | None] = ContextVar("OWNER", default=None)
"""The simulated process that the running code belongs to; None: the one under test, or its clients."""
FIRST_PID = 1 << 23
"""Above those of real processes."""


class SimulatedProcess:
    """One process, as the code that has started it sees it: a Popen; and its own files, tasks and handlers."""

    def __init__(
        self, loop: SimulatedLoop, fds: Sequence[int], on_exit: Callable[[int], None]
    ) -> None:
        """fds: what it inherits, under the same numbers."""
        self.pid = FIRST_PID + len(loop.processes)
        self.chance = loop.chance("process")
        self.returncode: int | None = None
        self.code: int | None = None
        """How it has ended, which the one that started it hears a little later; None: it runs."""
        self.is_stopped = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.sockets: list[SimulatedTransport] = []
        self.servers: list[SimulatedServer] = []
        self.on_terminate: Callable[[], None] | None = None
        """The handler of SIGTERM; None: it ends."""
        self.at_exit: Callable[[int], None] = lambda code: None
        """Called when it has ended, by the one that watches the simulation."""
        self.stdin, self.input = loop.pipe(self)
        self.stdout, self.output = loop.pipe(self)
        self.stderr = None
        self._loop = loop
        self._on_exit = on_exit
        self._fds = [os.dup(each) for each in fds]
        self._waiting_signals: list[int] = []
        self._continued = asyncio.Event()
        loop.processes.append(self)

    def poll(self) -> int | None:
        return self.returncode

    def run(self) -> None:
        """Begin with its program, as a task of its own."""
        token = OWNER.set(self)
        try:
            self.tasks.add(self._loop.create_task(self._run()))
        finally:
            OWNER.reset(token)

    async def _run(self) -> None:
        await asyncio.sleep(self.chance.choice((0.0, 1e-3, self.chance.uniform(0, 0.5))))
        assert self._loop.program is not None
        await self._loop.program(self)
        self.exit(0)

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError if it is known to have ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        self._loop.call_later(self.chance.choice((0.0, 1e-4)), self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _handle(self, number: int) -> None:
        if self.code is not None:
            return
        if number == signal.SIGKILL:
            self.exit(-number)
        elif number == signal.SIGSTOP:
            self.is_stopped = True
        elif number == signal.SIGCONT:
            self.is_stopped = False
            self._continue()
        elif self.is_stopped:
            self._waiting_signals.append(number)
        elif number == signal.SIGTERM and self.on_terminate is not None:
            token = OWNER.set(self)
            try:
                self.on_terminate()
            finally:
                OWNER.reset(token)
        else:
            self.exit(-number)

    async def stand_still(self) -> None:
        """Be stopped, until SIGCONT."""
        self.is_stopped = True
        self._continued.clear()
        await self._continued.wait()

    def _continue(self) -> None:
        self._continued.set()
        waiting, self._waiting_signals = self._waiting_signals, []
        for number in waiting:
            self._handle(number)
        for each in list(self.sockets):
            each.pump()
            each.peer.pump()

    def exit(self, code: int) -> None:
        """End now: its files close, its tasks do nothing more that anyone sees."""
        if self.code is not None:
            return
        self.code, self.is_stopped = code, False
        for task in sorted(self.tasks, key=hash):
            task.cancel()
        for server in self.servers:
            server.close()
        for each in self.sockets:
            each.die()
        for fd in self._fds:
            os.close(fd)
        self.at_exit(code)
        heard_s = self.chance.choice((0.0, 1e-3, self.chance.uniform(0, 0.1)))
        self._loop.call_later(heard_s, self._on_exit, code)


class SimulatedProcessTransport(BaseSubprocessTransport):
    """asyncio's own, for a simulated process."""

    _loop: SimulatedLoop

    def _start(self, *_: Any, pass_fds: Sequence[int] = (), **__: Any) -> None:
        made = SimulatedProcess(self._loop, pass_fds, self._ended)
        self._proc = made  # type: ignore[assignment]
        made.run()

    def _ended(self, code: int) -> None:
        self._process_exited(code)
