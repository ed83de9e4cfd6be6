"""A model's process of the simulation: it speaks what a router asks of one, and answers from a script."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from simulated_loop import SimulatedLoop
from simulated_processes import FIRST_PID, SimulatedProcess

from towerd.api.http.connection import ConnectionRunner
from towerd.router.loading.child import CHECK, LENGTH_BYTES
from towerd.settings.config import Config

GRACE_S = 10.0
"""As the daemon's: its requests may take so long at shutdown."""


@dataclass(frozen=True, slots=True)
class Temper:
    """How one process behaves, drawn when it gets its model."""

    check_s: float = 0.0
    load_s: float = 0.1
    refuses: bool = False
    """Its file is no model."""
    dies_loading: bool = False
    stops_loading: bool = False
    """It is stopped while it loads, and never continued."""
    ignores_terminate: bool = False
    write_s: float = 0.0
    """What is live takes so long to write at its end."""


class ModelWatcher(Protocol):
    """Sees what the processes of models do."""

    def temper(self, child: SimulatedModel) -> Temper:
        """Called when the process knows its model."""

    def takes_room(self, child: SimulatedModel) -> None:
        """It begins to load its weights."""

    def is_refused(self, child: SimulatedModel) -> None:
        """Its file is no model."""

    def is_loaded(self, child: SimulatedModel) -> None:
        """It answers requests."""

    def is_told_to_end(self, child: SimulatedModel) -> None:
        """It got SIGTERM."""

    def runs(self, child: SimulatedModel, id: str) -> None:
        """It begins to generate for a request."""

    def ends(self, child: SimulatedModel, id: str) -> None:
        """It has generated all of it."""


class SimulatedModel:
    """One process, from its start to its end."""

    def __init__(
        self, loop: SimulatedLoop, process: SimulatedProcess, watcher: ModelWatcher
    ) -> None:
        self.process = process
        self.number = process.pid - FIRST_PID
        self.name = ""
        self.running: Counter[str] = Counter()
        """The requests that it generates for."""
        self.has_room = False
        """It has begun to load its weights."""
        self.has_served = False
        """It was asked for something, so that it is known to be loaded."""
        self.temper = Temper()
        self._loop, self._watcher = loop, watcher
        self._is_closing = False
        self._is_cut = False
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """The process's program."""
        reader = asyncio.StreamReader()
        await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self.process.input
        )
        await self._loop.connect_write_pipe(asyncio.BaseProtocol, self.process.output)
        try:
            config: Config = pickle.loads(
                await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))
            )
            self.name = str(config.alias)
            self.temper = self._watcher.temper(self)
            while await reader.readexactly(1) == CHECK:
                await self._check()
            await reader.readexactly(LENGTH_BYTES)
        except asyncio.IncompleteReadError:  # the router has ended
            self.process.exit(1)
            return
        watch = asyncio.create_task(self._end_with_parent(reader))
        await self._serve(config)
        watch.cancel()

    async def _end_with_parent(self, reader: asyncio.StreamReader) -> None:
        await reader.read()
        self.process.exit(-signal.SIGKILL)

    async def _check(self) -> None:
        await asyncio.sleep(self.temper.check_s)
        self._refuse_if_bad()
        self._tell({"checked": True})

    def _refuse_if_bad(self) -> None:
        if self.temper.refuses:
            self._watcher.is_refused(self)
            said = f"{self.name} is not a GGUF file"
            self._tell({"error": said, "public": said, "kind": "server_error"})
            self.process.exit(1)

    def _tell(self, line: dict[str, Any]) -> None:
        self.process.output.write(json.dumps(line).encode() + b"\n")

    async def _serve(self, config: Config) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/towerd/v1/stats", self._stats)
        app.router.add_get("/props", self._props)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_delete("/v1/stream", self._end_stream)
        runner = ConnectionRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await runner.setup()
        await web.UnixSite(runner, str(config.socket)).start()
        ending = asyncio.Event()
        self.process.on_terminate = lambda: self._terminate(ending)
        await self._load()
        self._tell({})
        self.process.output.close()
        await ending.wait()
        self._is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._until_idle()
        self._is_cut = True
        await self._until_idle()
        await runner.cleanup()
        await asyncio.sleep(self.temper.write_s)

    def _terminate(self, ending: asyncio.Event) -> None:
        self._watcher.is_told_to_end(self)
        if not self.temper.ignores_terminate:
            ending.set()

    async def _load(self) -> None:
        self._refuse_if_bad()
        self.has_room = True
        self._watcher.takes_room(self)
        for step in range(1, 5):
            await asyncio.sleep(self.temper.load_s / 5)
            self._tell({"progress": step / 4})
            if step == 2 and self.temper.dies_loading:
                self.process.exit(-signal.SIGSEGV)
            if step == 3 and self.temper.stops_loading:
                await self.process.stand_still()
        await asyncio.sleep(self.temper.load_s / 5)
        self._watcher.is_loaded(self)

    async def _until_idle(self) -> None:
        while self.running:
            self._changed.clear()
            await self._changed.wait()

    # ---- what it answers ------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name, "meta": {"n_ctx": 2048}}]})

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response({"ram": {"ram_bytes_max": 0}})

    async def _props(self, request: web.Request) -> web.Response:
        return self._refused() if self._is_closing else web.json_response({"model": self.name})

    async def _end_stream(self, request: web.Request) -> web.Response:
        return self._refused() if self._is_closing else web.Response(status=204)

    def _refused(self) -> web.Response:
        error = {"code": 503, "message": "The server is shutting down", "type": "unavailable_error"}
        return web.json_response({"error": error}, status=503)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        if self._is_closing:
            return self._refused()
        with self._generating(asked["id"]):
            if not asked["stream"]:
                for _ in range(asked["n"]):
                    if self._is_cut:
                        return self._refused()
                    await asyncio.sleep(asked["pace_s"])
                self._watcher.ends(self, asked["id"])
                said = [piece(self.name, asked, k) for k in range(asked["n"])]
                return web.json_response({"pieces": said})
            return await self._stream(request, asked)

    async def _stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for k in range(asked["n"]):
            await asyncio.sleep(asked["pace_s"])
            if self._is_cut:
                error = {
                    "error": {"code": 503, "message": "cancelled", "type": "unavailable_error"}
                }
                await response.write(b"data: %s\n\n" % json.dumps(error).encode())
                return response
            said = json.dumps({"piece": piece(self.name, asked, k)}).encode()
            await response.write(b"data: %s\n\n" % said)
        await response.write(b"data: [DONE]\n\n")
        self._watcher.ends(self, asked["id"])
        return response

    @contextmanager
    def _generating(self, id: str) -> Iterator[None]:
        self.running[id] += 1
        self.has_served = True
        self._watcher.runs(self, id)
        try:
            yield
        finally:
            del self.running[id]
            self._changed.set()


def piece(model: str, asked: dict[str, Any], k: int) -> str:
    """What a model says to a request, in its k-th step."""
    padding: int = asked["padding"]
    return f"{model} {asked['id']} {k} " + "x" * padding
