"""Room: who must leave so that another model can be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupant:
    """A model that takes room."""

    name: str
    need_bytes: int
    last_used_s: float
    is_busy: bool = False
    """A request runs in it, or waits for it."""
    keep: bool = False
    is_twin: bool = False
    """It has the file of the model that needs room: a file is loaded once."""
    is_leaving: bool = False
    """It is being unloaded, and still takes its room."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What has to happen before a model can be loaded; nothing of this: it waits."""

    fits: bool = False
    stop: tuple[str, ...] = ()
    """Idle models to unload, the least recently used first."""
    never: bool = False
    """What is kept leaves too little room for it."""


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for all models together."""

    memory_bytes: int
    models_max: int
    """Models loaded at once; 0: any number."""
    is_limited: bool = False
    """Whether each process gets what the others leave, and keeps to it."""

    def share(self, occupants: Sequence[Occupant]) -> int:
        """Bytes that a model may take beside others, with everything that its process takes; 0: any number."""
        if not self.is_limited:
            return 0
        return max(1, self.memory_bytes - sum(each.need_bytes for each in occupants))

    def verdict(self, need_bytes: int, occupants: Sequence[Occupant]) -> Verdict:
        """What must leave for a model that needs so much. A model always fits alone,
        and never beside one of its own file."""
        if self._fits(need_bytes, occupants):
            return Verdict(fits=True)
        if not self._fits(need_bytes, [each for each in occupants if each.keep]):
            return Verdict(never=True)
        staying = [each for each in occupants if not each.is_leaving]
        idle = [each for each in staying if not each.is_busy and not each.keep]
        idle.sort(key=lambda each: each.last_used_s)
        stop: list[Occupant] = []
        for each in idle:
            if self._fits(need_bytes, staying):
                break
            staying.remove(each)
            stop.append(each)
        if not self._fits(need_bytes, staying):
            return Verdict()
        for each in reversed(stop.copy()):  # what later ones left room for
            if self._fits(need_bytes, [*staying, each]):
                staying.append(each)
                stop.remove(each)
        return Verdict(stop=tuple(each.name for each in stop))

    def _fits(self, need_bytes: int, others: Sequence[Occupant]) -> bool:
        if any(each.is_twin for each in others):
            return False
        if self.models_max and len(others) >= self.models_max:
            return False
        taken = sum(each.need_bytes for each in others)
        return not others or taken + need_bytes <= self.memory_bytes
