"""What must hold in the life of a simulated router, whatever its clients, processes and sockets do."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from router_plan import Plan
from simulated_loop import SimulatedLoop
from simulated_model import SimulatedModel, Temper, piece
from simulated_processes import SimulatedProcess

from towerd.router.loading.model import FAILED_S

LIFE_S = 5000.0
"""Longer than any life."""
HEARD_S = 2.0
"""After the end of what excuses an error, until all have heard of it."""


@dataclass(slots=True)
class Excuse:
    """A time in which a model's requests may end with an error: something happened to it."""

    why: str
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Asked:
    """One request of a client."""

    id: str
    model: str
    body: dict[str, Any]
    began_s: float
    ran: list[str] = field(default_factory=list)
    """The models whose processes generated for it."""
    ended: int = 0
    """How many of them have generated all."""
    has_left: bool = False
    """Its client does not wait for the reply any more."""
    is_kept: bool = False
    """It is a stream that outlives its client."""
    is_stopped: bool = False
    """It was told to end."""


class RouterOracle:
    """Sees what processes do and what clients get, and notes it."""

    def __init__(self, loop: SimulatedLoop, plan: Plan) -> None:
        self.plan = plan
        self.operations: list[str] = []
        self.excuses: dict[str, list[Excuse]] = {name: [] for name in plan.names}
        self.asked: dict[str, Asked] = {}
        self.children: dict[int, SimulatedModel] = {}
        self.told: list[tuple[str, float, float]] = []
        """Which models clients had unloaded, and when that was asked and answered."""
        self.is_calm = False
        """Nothing bad happens from now on."""
        self.is_ending = False
        self.wrong: list[str] = []
        """What must not be, as it was seen."""
        self._loop = loop

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def note(self, text: str) -> None:
        """One line of the trace."""
        self.operations.append(f"{self.now - 1000:.6f} {text}")

    def must(self, holds: object, text: str) -> None:
        """Note what does not hold; raised at the next moment that a client runs."""
        if not holds:
            self.note(f"WRONG: {text}")
            self.wrong.append(text)

    # ---- the processes --------------------------------------------------------------------------

    def program(self, made: SimulatedProcess) -> Coroutine[Any, Any, None]:
        """What runs in a process."""
        child = self.children[made.pid] = SimulatedModel(self._loop, made, self)
        made.at_exit = partial(self._exits, child)
        return child.run()

    def _exits(self, child: SimulatedModel, code: int) -> None:
        self.note(f"process {child.number} of {child.name or 'none'} ends: {code}")
        if child.has_served and code:
            is_meant = self.is_ending or self._excused(child.name, self.now)
            self.must(is_meant, f"the process of {child.name}, which is loaded, ends with {code}")
        for each in self.excuses.get(child.name, ()):
            each.ended_s = min(each.ended_s, self.now + HEARD_S)

    def excuse(self, model: str, why: str, for_s: float = LIFE_S) -> None:
        """Errors of a model are excused for so long, or until its process has ended."""
        now = self.now
        self.excuses[model].append(Excuse(why, now, now + for_s))

    def temper(self, child: SimulatedModel) -> Temper:
        chance = child.process.chance
        load_s = chance.choice((0.01, 0.5, chance.uniform(0, 20)))
        times: dict[str, Any] = {
            "check_s": chance.choice((0.01, 1.0)),
            "load_s": load_s,
            "write_s": chance.random() * 3,
        }
        if self.is_calm or not self.plan.has_faults or chance.random() < 0.6:
            return Temper(**times)
        fate = chance.choice(("refuses", "dies_loading", "stops_loading", "ignores_terminate"))
        self.note(f"process {child.number} of {child.name} will be one that {fate}")
        return Temper(**times, **{fate: True})

    def takes_room(self, child: SimulatedModel) -> None:
        self.note(f"process {child.number} loads {child.name}")
        loaded = [
            each for each in self.children.values() if each.has_room and each.process.code is None
        ]
        names = sorted(each.name for each in loaded)
        most = self.plan.models_max
        self.must(not most or len(loaded) <= most, f"{names} are loaded at once")
        self.must(len(names) == len(set(names)), f"{names}: one is loaded twice")
        self.must(not {"twin", self.plan.twin} <= set(names), f"{names} are one file")
        taken = sum(self.plan.sizes[name] for name in names)
        self.must(len(names) == 1 or taken <= self.plan.memory, f"{names} take {taken} bytes")
        if child.temper.dies_loading or child.temper.stops_loading:
            self.excuse(child.name, "its load fails")

    def is_refused(self, child: SimulatedModel) -> None:
        self.excuse(child.name, "its file is refused")

    def is_loaded(self, child: SimulatedModel) -> None:
        self.note(f"process {child.number} has loaded {child.name}")

    def is_told_to_end(self, child: SimulatedModel) -> None:
        self.note(f"process {child.number} of {child.name} is told to end")
        if child.temper.ignores_terminate:
            self.excuse(child.name, "its process does not end")
        running = [id for id in child.running if not self.asked[id].has_left]
        is_meant = self.is_ending or self._excused(child.name, self.now)
        self.must(is_meant or not running, f"{child.name} is unloaded while it answers {running}")

    def runs(self, child: SimulatedModel, id: str) -> None:
        self.note(f"process {child.number} of {child.name} answers {id}")
        self.asked[id].ran.append(child.name)

    def resident(self, pid: int) -> int:
        child = self.children[pid]
        is_there = child.has_room and child.process.code is None
        return self.plan.sizes[child.name] if is_there else 0

    def is_stopped(self, pid: int) -> bool:
        made = self.children[pid].process
        return made.is_stopped and made.code is None

    def ends(self, child: SimulatedModel, id: str) -> None:
        self.asked[id].ended += 1

    # ---- what clients get ---

    def mistake(self, asked: Asked, status: int, said: bytes) -> str:
        """How a reply differs from the whole answer; empty: it is that."""
        wanted = [piece(asked.model, asked.body, k) for k in range(asked.body["n"])]
        if status != 200:
            return self._error_of(asked, said)
        if not asked.body["stream"]:
            assert json.loads(said)["pieces"] == wanted, f"{asked.id} got {said[:200]!r}"
            return ""
        lines = [line[6:] for line in said.split(b"\n") if line.startswith(b"data: ")]
        for n, line in enumerate(lines):
            if line == b"[DONE]":
                whole = lines[:-1] == lines[:n] and n == len(wanted)
                return "" if whole else f"it ended after {n} pieces"
            got = json.loads(line)
            if "error" in got:
                return self._error_of(asked, line)
            assert got["piece"] == wanted[n], f"{asked.id} got {line[:200]!r}"
        return f"it ended after {len(lines)} pieces without an end"

    def _error_of(self, asked: Asked, said: bytes) -> str:
        error = json.loads(said)["error"]
        shape = {"code": int, "message": str, "type": str}
        assert {name: type(error[name]) for name in shape} == shape, f"{asked.id} got {said!r}"
        return str(error["message"])

    def leaves(self, asked: Asked) -> None:
        """A client does not wait for its reply any more."""
        self.note(f"{asked.id} has left")
        asked.has_left = True
        self.must(len(asked.ran) <= 1, f"{asked.id} was answered by {asked.ran}")

    def judge(self, asked: Asked, mistake: str) -> None:
        """An error has its excuse."""
        self.note(f"{asked.id} got {mistake or 'its answer'}")
        self.must(len(asked.ran) <= 1, f"{asked.id} was answered by {asked.ran}")
        if not mistake:
            self.must(asked.ran == [asked.model], f"{asked.id} was answered by {asked.ran}")
            return
        is_excused = asked.is_stopped and "request cancelled by a stop" in mistake
        if self.plan.kept:
            is_excused |= "There is no room for" in mistake or "which is kept loaded" in mistake
        if "was unloaded while it was loading" in mistake:
            is_excused |= any(
                name == asked.model and ended_s + HEARD_S >= asked.began_s
                for name, _, ended_s in self.told
            )
        if not is_excused:
            self.must_excuse(asked.model, asked.began_s, f"{asked.id} of {asked.model}: {mistake}")

    def must_excuse(self, model: str, began_s: float, mistake: str) -> None:
        """Note a mistake, unless something happened to the model since then."""
        self.must(self.is_ending or self._excused(model, began_s), mistake)

    def check_kept(self) -> None:
        """Streams that outlive their clients were generated to their ends."""
        for each in self.asked.values():
            if each.is_kept and each.ran and not each.ended and not each.is_stopped:
                self.must_excuse(each.model, each.began_s, f"the stream {each.id} was not kept")

    def check(self) -> None:
        """Raises AssertionError for the first thing that was wrong."""
        assert not self.wrong, self.wrong[0]
        assert not self._loop.failures, self._loop.failures[0]

    def _excused(self, model: str, began_s: float) -> bool:
        """Whether something happened to a model since then; that it failed is remembered."""
        return any(each.ended_s + FAILED_S >= began_s for each in self.excuses[model])
