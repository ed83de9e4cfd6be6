"""LlamaServerProcess: a supervised llama-server on a free loopback port, with its own key.

It is restarted when it dies, after a growing pause, and its last messages are logged. It dies with
towerd, whatever ends towerd (see `guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.errors import ConfigError
from towerd.system.process import is_stopped

log = logging.getLogger(__name__)

POLL_S = 0.02
START_S_MAX = 1800.0
"""The most time for loading; a big model on a slow disk takes minutes."""
STOPPED_S_MAX = 30.0
"""One that is stopped by a signal for so long while it starts is given up."""
HEALTH_S_MAX = 5.0
STOP_S_MAX = 10.0
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pause before the n-th start in a row; the last one repeats."""
STABLE_S = 60.0
"""After running this long a failure counts as the first in a row."""
LOG_BYTES_MAX = 32 << 20
LOG_TAIL_BYTES = 2000
_KEY_BYTES = 32
GUARD = Path(__file__).with_name("guard.py")
GUARD_METHOD = "kernel" if sys.platform == "linux" else "watch"
_PIPE = asyncio.subprocess.PIPE
"""Never written to; its closing tells a watching guard that towerd has ended."""


class LlamaServerProcess:
    """`command(port)` gives the arguments after the binary. Make it on the event loop."""

    def __init__(
        self,
        binary: Path,
        command: Callable[[int], Sequence[str]],
        *,
        env: dict[str, str],
        log_path: Path,
        back_off_s: Sequence[float] = BACK_OFF_S,
    ) -> None:
        self.upstream = UpstreamClient("http://127.0.0.1:0", secrets.token_hex(_KEY_BYTES))
        self.is_running = False
        self.restarts = 0
        self.exit_reason = ""
        """Why it ended last, as a person would say it."""
        self.log_path = log_path
        self.on_exit: Callable[[], None] | None = None
        """Called on the loop when it died unexpectedly."""
        self.on_start: Callable[[], Awaitable[None]] | None = None
        """Awaited when it answers again, before it is used."""
        self._binary = binary
        self._command = command
        self._env = env
        self._back_off_s = tuple(back_off_s)
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The child, while there is one: llama-server, or the guard that watches over it."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start and wait until it serves; from then on it is kept running. Raises ConfigError
        with its last words when it does not come up."""
        await self._spawn()
        try:
            await self._wait_healthy()
        except BaseException:
            await self._kill()
            raise
        self.is_running = True
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Stop it for good: SIGTERM first, SIGKILL if that does not end it."""
        self.is_running = False
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        process = self._process
        if process is not None and process.returncode is None:
            self._signal(process, signal.SIGTERM)
            self.wake()
            try:
                await asyncio.wait_for(process.wait(), STOP_S_MAX)
            except TimeoutError:
                await self._kill()
        await self.upstream.aclose()

    def wake(self) -> None:
        """Continue it if it is stopped: it hears no other signal before SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._signal(self._process, signal.SIGCONT)

    # ---- one start ------------------------------------------------------------------------

    async def _spawn(self) -> None:
        port = free_port()
        self.upstream.url = f"http://127.0.0.1:{port}"
        guard = [sys.executable, "-I", "-S", str(GUARD), GUARD_METHOD, str(os.getpid())]
        # The key goes through the environment: any user can read a command line.
        env = self._env | {"LLAMA_API_KEY": self.upstream.key or ""}
        handle = await asyncio.to_thread(self._open_log)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *guard,
                str(self._binary),
                *self._command(port),
                stdin=_PIPE if GUARD_METHOD == "watch" else asyncio.subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env=env,
                start_new_session=True,  # ^C is for towerd, which then stops it in order
            )
        except OSError as error:
            raise ConfigError(f"{self._binary} cannot be run: {error.strerror}.") from error
        finally:
            os.close(handle)

    async def _wait_healthy(self) -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        runs_s = loop.time()
        deadline = runs_s + START_S_MAX
        while not await self._is_healthy():
            if not is_stopped(self._process.pid):
                runs_s = loop.time()
            if loop.time() - runs_s > STOPPED_S_MAX:
                raise ConfigError("llama-server was stopped by a signal while starting.")
            if self._process.returncode is not None:
                reason = describe_exit(self._process.returncode)
                raise ConfigError(f"llama-server {reason} while starting: {self._last_words()}")
            if loop.time() > deadline:
                raise ConfigError(f"llama-server did not start in {START_S_MAX:.0f} s.")
            await asyncio.sleep(POLL_S)

    async def _is_healthy(self) -> bool:
        try:
            return await asyncio.wait_for(self.upstream.is_healthy(), HEALTH_S_MAX)
        except TimeoutError:
            return False

    async def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            self._signal(process, signal.SIGKILL)
            await process.wait()

    @staticmethod
    def _signal(process: asyncio.subprocess.Process, number: int) -> None:
        """To its whole group: the guard, llama-server, and tools that it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    # ---- supervision ----------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Wait until it dies, log why and restart it, for ever."""
        loop = asyncio.get_running_loop()
        failures = 0
        started = loop.time()
        while True:
            assert self._process is not None
            code = await self._wait()
            self.is_running = False
            self._signal(self._process, signal.SIGKILL)  # any processes that it leaves behind
            if loop.time() - started > STABLE_S:
                failures = 0
            self.exit_reason = describe_exit(code)
            extra = {"said": self._last_words(), "log": str(self.log_path)}
            log.error("llama-server %s; starting it again", self.exit_reason, extra=extra)
            if self.on_exit is not None:
                self.on_exit()
            await asyncio.sleep(self._back_off_s[min(failures, len(self._back_off_s) - 1)])
            failures += 1
            started = loop.time()
            await self._restart()

    async def _wait(self) -> int:
        """Its exit status; meanwhile its log is kept from growing without bound."""
        assert self._process is not None
        waiting = asyncio.create_task(self._process.wait())
        try:
            while not (await asyncio.wait((waiting,), timeout=STABLE_S))[0]:
                await asyncio.to_thread(self._trim_log)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _restart(self) -> None:
        try:
            await self._spawn()
            await self._wait_healthy()
        except (ConfigError, OSError) as error:  # it is tried again
            log.error("llama-server does not come back", extra={"error": str(error)})
            await self._kill()
            return
        if self.on_start is not None:
            await self.on_start()
        self.restarts += 1
        self.is_running = True
        log.warning("llama-server runs again", extra={"restarts": self.restarts})

    # ---- its log --------------------------------------------------------------------------

    def _open_log(self) -> int:
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.log_path, flags, 0o600)

    def _trim_log(self) -> None:
        """Truncate a log that is too long: the child appends, so it continues at the new end."""
        with contextlib.suppress(OSError):
            if self.log_path.stat().st_size > LOG_BYTES_MAX:
                os.truncate(self.log_path, 0)

    def _last_words(self) -> str:
        """Its last complaint, or last line, for an error message."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return "it left no log"
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if " E " in line or "error" in line.lower()]
        return (errors or said or ["it said nothing"])[-1]


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
