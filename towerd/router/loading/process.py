"""ModelProcess: a model in a process of its own, which only its router can ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from aiohttp import ClientResponse

from towerd.api.http.tenants import CALLER, SOCKET
from towerd.engine.llama_server.process.client import Body, Client
from towerd.engine.llama_server.process.process import describe_exit
from towerd.engine.llama_server.process.silence import LOOK_S
from towerd.errors import DiskFull, ModelError, ServedAlready, TowerdError
from towerd.router.loading.child import CHECK, LENGTH_BYTES, LOAD
from towerd.settings.config import Config, chats_bytes
from towerd.store.catalog.shared.broker import CatalogConnection
from towerd.system.process import is_stopped

STOP_S_MAX = 120.0
"""For the requests that run and for writing what is live, together; then the process is killed."""
WRITE_S = 30.0
"""How much of it requests leave: for what they have made so far and for writing what is live."""
STOPPED_S_MAX = 30.0
"""A process that is stopped for so long while it loads is ended."""
COMMAND = (sys.executable, "-P", "-m", "towerd.router.loading.child")


class ModelProcess:
    """Is started, gets its model, may check it, loads it, is asked, and stops: each once. Without a
    model it has imported what it needs, and waits."""

    def __init__(self, engine: str, catalog: CatalogConnection) -> None:
        """engine: of its model. catalog: a connection to the store's catalog, whose socket the process
        inherits under its number; closed here then."""
        self.engine = engine
        self.blocks_others = catalog.blocks_others
        """Whether processes of other models wait for this one."""
        self.is_settled = asyncio.Event()
        """Set when its model is loaded, or will not be."""
        self._catalog = catalog.socket
        self._catalog_fd = catalog.socket.fileno()
        self._config: Config | None = None
        self._has_config = False
        """Whether the process has it."""
        self._was_stopped = False
        """Whether it was ended because it was stopped while it loaded."""
        self._client: Client | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def chats_bytes(self) -> int:
        """RAM that it may yet take for conversations that are not live."""
        assert self._config is not None
        return chats_bytes(self._config)

    @property
    def pid(self) -> int:
        """The process, once it has started."""
        assert self._process is not None
        return self._process.pid

    @property
    def pid_if_started(self) -> int | None:
        """The process; None before it has started."""
        return None if self._process is None else self._process.pid

    def assign(self, config: Config) -> None:
        """Choose the model that `load` loads."""
        self._config = replace(config, catalog_fd=self._catalog_fd)
        self._client = Client("http://model", config.socket)

    async def start(self) -> None:
        """Start the process, without a model. Raises OSError."""
        with self._catalog:
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(self._catalog_fd,),
            )

    async def check(self) -> None:
        """Check that the model's file says what a model does, without loading its weights. Raises as
        `load`; the process is to be ended then, else `load` is next."""
        await self._order(CHECK)
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line or "error" in json.loads(line):
            raise await self._why_not(line)

    async def load(self, on_progress: Callable[[float], None], ram_max: int = 0) -> None:
        """Load the model, starting the process if it was not, and return when requests are answered.
        on_progress: gets the share of the weights that is loaded, from 0 to 1, rising. ram_max: bytes of RAM that the
        process may take; 0: no limit. Raises ModelError or DiskFull
        with the reason why that did not come about, and OSError; `exit_code` has its status then."""
        try:
            await self._load(on_progress, ram_max)
        finally:
            self.is_settled.set()

    async def _load(self, on_progress: Callable[[float], None], ram_max: int) -> None:
        await self._order(LOAD + ram_max.to_bytes(LENGTH_BYTES))
        assert self._process is not None
        assert self._process.stdout is not None
        stopping = asyncio.create_task(self._end_if_stopped())
        try:
            while line := await self._process.stdout.readline():
                said = json.loads(line)
                if "progress" not in said:
                    break
                on_progress(said["progress"])
        except BaseException:
            self.kill()
            raise
        finally:
            stopping.cancel()
        if line.strip() != b"{}":
            raise await self._why_not(line)

    async def _end_if_stopped(self) -> None:
        """End the process when it is stopped for long while it loads: its requests would wait for ever,
        and those of others if it has the catalog's turn."""
        n_looks = 0
        while n_looks * LOOK_S < STOPPED_S_MAX:
            await asyncio.sleep(LOOK_S)
            n_looks = n_looks + 1 if is_stopped(self.pid) else 0
        self._was_stopped = True
        self.kill()

    async def _order(self, what: bytes) -> None:
        """Say what to do with the model; its settings come before the first such order."""
        if self._process is None:
            await self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._has_config:
            config = pickle.dumps(self._config)
            what = len(config).to_bytes(LENGTH_BYTES) + config + what
            self._has_config = True
        with contextlib.suppress(ConnectionError):  # it ended: its status says why
            self._process.stdin.write(what)
            await self._process.stdin.drain()

    async def _why_not(self, line: bytes) -> TowerdError:
        """The error for a start that failed. Clients get the model's name where its file is meant."""
        await self.wait()
        assert self._config is not None
        name = str(self._config.alias)
        if self._was_stopped:
            return ModelError(
                f"The process of the model {name} was stopped while loading, and was ended after "
                f"{STOPPED_S_MAX:.0f} s."
            )
        if not line:
            return ModelError(
                f"The process of the model {name} {self.how_it_ended()} while loading."
            )
        said = json.loads(line)
        for kind in (DiskFull, ServedAlready):
            if kind.__name__ in said["kinds"].split():
                return kind(said["error"])
        public = said["public"].replace(str(self._config.model), name)
        return ModelError(said["error"], public=public)

    def how_it_ended(self) -> str:
        """Its exit status in words."""
        assert self.exit_code is not None
        return describe_exit(self.exit_code)

    @property
    def exit_code(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def wait(self) -> int:
        """Wait until it ends; as `exit_code`."""
        assert self._process is not None
        code = await self._process.wait()
        if self._client is not None:
            await self._client.aclose()
        return code

    async def stop(self, deadline_s: float) -> None:
        """Let it finish its requests and write what is live; SIGKILL if it has not ended when
        time.monotonic() is `deadline_s`."""
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
                self._process.send_signal(signal.SIGCONT)  # one that is stopped hears nothing else
        try:
            await asyncio.wait_for(self.wait(), max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            await self.end()

    def resume(self) -> None:
        """Continue it, if it is stopped: its requests are to end."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self) -> None:
        """End it at once, if it was started, and wait until it has."""
        self.is_settled.set()
        self._catalog.close()
        self.kill()
        if self._process is not None:
            await self.wait()

    async def drop_requests(self) -> None:
        """End the requests that wait for it: they raise Lost."""
        if self._client is not None:
            await self._client.drop()

    async def answer(self) -> None:
        """Return when it answers for its health. Raises as `Client.send`."""
        (await self.send("GET", "/health", {CALLER: SOCKET})).close()

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: Body = None
    ) -> ClientResponse:
        """Send a request; see `Client.send`."""
        assert self._client is not None
        return await self._client.send(method, path, headers, body)
