"""A router's life on simulated sockets with simulated processes, all drawn from one seed, and what must hold."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from router_clients import RouterClient
from router_oracle import HEARD_S, LIFE_S, RouterOracle
from router_plan import ADDRESS, GIB, Plan
from simulated_loop import SimulatedLoop, simulated_loop

from towerd.engine.llama_server.process import silence
from towerd.router import router
from towerd.router.loading import models, process
from towerd.settings import config
from towerd.settings.sources import load_models

REST_S = 300.0
"""Longer than anything in the router waits before it kills."""


class RouterSimulation:
    """One router, its clients and its processes, until all has come to rest."""

    def __init__(self, seed: int, loop: SimulatedLoop, folder: Path) -> None:
        self.loop = loop
        self.chance = random.Random(f"{seed} router")
        self.plan = Plan(self.chance, folder)
        self.oracle = RouterOracle(loop, self.plan)

    async def live(self, main: Coroutine[Any, Any, None]) -> None:
        """Everything, from the router's start to its end. Raises AssertionError."""
        serving = asyncio.create_task(main)
        while ADDRESS not in self.loop.listening:
            assert not serving.done(), serving.result()
            await asyncio.sleep(0.01)
        clients = [asyncio.create_task(self._live_as_client()) for _ in range(self.plan.n_clients)]
        if self.plan.ends_early:
            span_s = self.plan.pause_s * self.plan.n_operations
            await asyncio.sleep(self.chance.uniform(0, 2 * span_s))
            self._stop()
        await asyncio.gather(*clients)
        if not self.oracle.is_ending:
            self.oracle.is_calm = True
            await asyncio.sleep(REST_S)
            await self._check_rest()
            self._stop()
        await serving
        await asyncio.sleep(HEARD_S)
        alive = [each.number for each in self.oracle.children.values() if each.process.code is None]
        assert not alive, f"processes {alive} are left"
        assert not self.loop.listening
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        gc.collect()  # tells of errors that nothing has looked at
        self.oracle.check()

    def _stop(self) -> None:
        self.oracle.note("the router is told to end")
        self.oracle.is_ending = self.oracle.is_calm = True
        self.loop.signal(signal.SIGTERM)

    async def _live_as_client(self) -> None:
        async with RouterClient(self.loop, self.oracle, self.loop.chance("client")) as client:
            await client.live()

    # ---- at rest ---------------------------------------------------------------------------------

    async def _check_rest(self) -> None:
        """Each model answers, one after the other, whatever has happened; and nothing is left over."""
        self.oracle.note("at rest")
        self.oracle.check_kept()
        for child in self.oracle.children.values():
            child.temper = replace(child.temper, ignores_terminate=False)
        for each in self.oracle.excuses.values():
            each.clear()
        async with RouterClient(self.loop, self.oracle, self.loop.chance("client")) as client:
            for name in self.plan.names:
                await client.expect(name, within_s=100)
            await asyncio.sleep(60)
            listed, metrics = await client.states(), await client.metrics()
        alive = [each for each in self.oracle.children.values() if each.process.code is None]
        loaded = sorted(each.name for each in alive if each.has_room)
        assert loaded == sorted(name for name in listed if listed[name] == "loaded"), listed
        assert len(alive) - len(loaded) <= 1, "more than one process is in reserve"
        assert not any(each.running for each in alive)
        assert "towerd_model_requests_waiting 0.0" in metrics.splitlines()


@contextmanager
def _edges(simulation: RouterSimulation, loop: SimulatedLoop) -> Iterator[None]:
    """The loop, the clock and what the system says of processes are the simulation's, inside the block."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        loop.program = simulation.oracle.program
        loop.simulate(simulation.live(main), LIFE_S)

    with (
        patch.object(router, "run_on_loop", run),
        patch.object(router, "tune_gc", lambda: None),
        patch.object(router, "name_process", lambda name: None),
        patch.object(models, "resident_bytes", simulation.oracle.resident),
        patch.object(process, "is_stopped", simulation.oracle.is_stopped),
        patch.object(silence, "is_stopped", simulation.oracle.is_stopped),
        patch.object(config, "ram_bytes", lambda: 16 * GIB),
        patch.object(config, "container_ram_max", lambda: 0),
        patch.object(config, "free_bytes", lambda *_: 1000 * GIB),
        patch.object(time, "monotonic", loop.time),
        patch.object(time, "time", lambda: 1e9 + loop.time()),
        redirect_stdout(io.StringIO()),
    ):
        yield


def simulate_router(seed: int) -> tuple[str, list[str]]:
    """What a seed finds, empty if that is nothing; and its operations."""
    memory = Path("/dev/shm")
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.disable()  # what an earlier seed left would be freed at any moment of this one
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made,
        simulated_loop(seed) as loop,
    ):
        simulation = RouterSimulation(seed, loop, Path(made))
        operations, found = simulation.oracle.operations, ""
        try:
            with _edges(simulation, loop):
                router.run(load_models({}, {}, Path(made) / "towerd.toml"))
            operations.append(f"{loop.virtual.n_steps} steps, {loop.n_bytes} bytes")
        except Exception:
            found = traceback.format_exc(limit=-6)
        finally:
            gc.enable()
            logging.disable(level)
    return found, operations
