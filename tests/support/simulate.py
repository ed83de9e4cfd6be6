"""Lives of a store on a simulated disk: of the store alone in one thread, and of all that works on it in many, of
one that several processes have open, and lives of a router on simulated sockets.

PYTHONHASHSEED=0 python tests/support/simulate.py --seeds 50
PYTHONHASHSEED=0 python tests/support/simulate.py --seed 17 --kind house
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from broker_simulation import BrokerHouse
from house import House
from router_simulation import simulate_router
from simulated_disk import SimulatedDisk
from simulation import Simulation

STUCK_S = 300
"""A seed that takes longer ends the program, with what every thread does."""
LAST_OPERATIONS = 25
"""The number of operations that a failure prints."""


class Simulated(Protocol):
    """What lives, drawn from a seed."""

    kind: str
    """What `--kind` calls it."""
    operations: list[str]

    @property
    def disk(self) -> SimulatedDisk:
        """The disk of the last life."""
        ...

    def run(self, prepare: Callable[[Path], None]) -> None:
        """Live and check. prepare: called with the store's directory."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """What a seed has found."""

    seed: int
    error: str
    operations: list[str]
    kind: str

    def text(self) -> str:
        """The last operations, the error, and how to run it again."""
        last = "\n".join(f"  {each}" for each in self.operations[-LAST_OPERATIONS:])
        again = f"make simulate SEED={self.seed} KIND={self.kind}"
        return (
            f"seed {self.seed} failed; its last operations:\n{last}\n{self.error}\nagain: {again}"
        )


def simulate(
    seed: int,
    prepare: Callable[[Path], None] = lambda root: None,
    kind: Callable[[int, Path], Simulated] = Simulation,
) -> tuple[Failure | None, list[str]]:
    """What a seed finds, and its operations. prepare: see `Simulated.run`; kind: what lives"""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        simulation = kind(seed, Path(made))
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # recoveries are expected
        # what an earlier seed left would be freed at any moment of this one, and files closed by that
        gc.collect()
        gc.disable()
        try:
            simulation.run(prepare)
        except Exception:
            error = traceback.format_exc(limit=-6)
            trace = simulation.disk.trace[-10:]
            operations = [*simulation.operations, *trace]
            return Failure(seed, error, operations, simulation.kind), simulation.operations
        finally:
            gc.enable()
            logging.disable(level)
        return None, simulation.operations


def simulated_router(seed: int) -> tuple[Failure | None, list[str]]:
    """As `simulate`, for a router."""
    error, operations = simulate_router(seed)
    return Failure(seed, error, operations, "router") if error else None, operations


def main() -> int:
    """Run the seeds; the exit code is 1 if one failed."""
    stores: list[type[Simulated]] = [Simulation, House, BrokerHouse]
    kinds: dict[str, Callable[[int], tuple[Failure | None, list[str]]]] = {
        **{each.kind: partial(simulate, kind=each) for each in stores},
        "router": simulated_router,
    }
    parser = argparse.ArgumentParser(description="Simulate a store on a disk that fails, a router.")
    parser.add_argument("--seeds", type=int, default=50, help="how many, from --first (50)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--seed", type=int, help="one alone, again")
    parser.add_argument("--kind", choices=kinds, help="what lives (each of them)")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else [args.seed]
    for name in kinds if args.kind is None else [args.kind]:
        began = time.monotonic()
        for seed in seeds:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            failure, operations = kinds[name](seed)
            if failure is not None:
                print(f"{name}: {failure.text()}")
                return 1
            if args.seed is not None:
                print("\n".join(operations))
        took = time.monotonic() - began
        print(f"{name}: {len(seeds)} seeds, nothing found in {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
