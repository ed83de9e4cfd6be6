"""A router's life on simulated sockets with simulated processes, all drawn from one seed, and what must hold.

PYTHONHASHSEED=0 python tests/support/router_simulation.py --seeds 50
PYTHONHASHSEED=0 python tests/support/router_simulation.py --seed 17
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
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

LAST_OPERATIONS = 25
"""The number of operations that a failure prints."""
REST_S = 300.0
"""Longer than anything in the router waits before it kills."""


@dataclass(frozen=True, slots=True)
class RouterFailure:
    """What a seed has found."""

    seed: int
    error: str
    operations: list[str]

    def text(self) -> str:
        """The last operations, the error, and how to run it again."""
        last = "\n".join(f"  {each}" for each in self.operations[-LAST_OPERATIONS:])
        again = f"make simulate SEED={self.seed}"
        return f"router, seed {self.seed} failed; its last operations:\n{last}\n{self.error}\nagain: {again}"


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


def simulate_router(seed: int) -> tuple[RouterFailure | None, list[str]]:
    """What a seed finds, and its operations."""
    memory = Path("/dev/shm")
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made,
        simulated_loop(seed) as loop,
    ):
        simulation = RouterSimulation(seed, loop, Path(made))
        try:
            with _edges(simulation, loop):
                router.run(load_models({}, {}, Path(made) / "towerd.toml"))
            simulation.oracle.note(f"{loop.virtual.n_steps} steps, {loop.n_bytes} bytes")
        except Exception:
            error = traceback.format_exc(limit=-6)
            return RouterFailure(
                seed, error, simulation.oracle.operations
            ), simulation.oracle.operations
        finally:
            logging.disable(level)
    return None, simulation.oracle.operations


def main() -> int:
    """Run the seeds; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(
        description="Simulate a router, its clients and its processes."
    )
    parser.add_argument("--seeds", type=int, default=50, help="how many, from 0 (50)")
    parser.add_argument("--seed", type=int, help="one alone, again")
    args = parser.parse_args()
    seeds = range(args.seeds) if args.seed is None else [args.seed]
    for seed in seeds:
        failure, operations = simulate_router(seed)
        if failure is not None:
            print(failure.text())
            return 1
        if args.seed is not None:
            print("\n".join(operations))
    print(f"router: {len(seeds)} seeds, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
