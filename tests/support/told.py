"""What clients of one store were told, and what it may therefore be found with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, TypeAlias

Key: TypeAlias = object
Value: TypeAlias = object
"""None: it is not there."""


@dataclass(eq=False, slots=True)
class Said:
    """One operation on one thing, from when it was asked for until it was acknowledged."""

    value: Value
    began: float
    ended: float = inf


Made: TypeAlias = dict[Key, Said]
"""An operation on some things, while it is under way."""


class Told:
    """The operations on everything, each of which sets one thing to a value, as several threads ask for them."""

    def __init__(self) -> None:
        self._said: dict[Key, list[Said]] = {}
        self._ticks = count(1)

    def begin(self, values: Mapping[Key, Value]) -> Made:
        """An operation is asked for that sets these."""
        now = next(self._ticks)
        made = {key: Said(value, now) for key, value in values.items()}
        for key, said in made.items():
            self._said.setdefault(key, [Said(None, 0, 0)]).append(said)
        return made

    def acknowledge(self, made: Mapping[Key, Said]) -> None:
        """It was done."""
        now = next(self._ticks)
        for said in made.values():
            said.ended = now

    def refuse(self, made: Mapping[Key, Said]) -> None:
        """It was not, and has changed nothing."""
        for key, said in made.items():
            self._said[key].remove(said)

    def allowed(self, key: Key) -> list[Value]:
        """What a thing may be now: what an operation set it to that none certainly followed."""
        every = self._said.get(key, [Said(None, 0, 0)])
        return [
            each.value
            for each in every
            if not any(other.began > each.ended for other in every if other.ended < inf)
        ]

    def last(self, kind: str) -> dict[Any, Any]:
        """By name the things of a kind that are there for all that was acknowledged last."""
        found = {}
        for key, said in self._said.items():
            done = max((each for each in said if each.ended < inf), key=lambda each: each.ended)
            if isinstance(key, tuple) and key[0] == kind and done.value is not None:
                found[key[1]] = done.value
        return found

    def possible(self, kind: str) -> dict[str, list[Value]]:
        """By name the things of a kind that may be there, and what they may be."""
        keys = [key for key in self._said if isinstance(key, tuple) and key[0] == kind]
        found = {key[1]: [each for each in self.allowed(key) if each is not None] for key in keys}
        return {name: values for name, values in found.items() if values}

    def wrong(self, found: Mapping[Key, Value], ignored: str = "") -> list[str]:
        """What is found otherwise than it may be. ignored: a kind of which None allows anything"""
        problems = []
        for key in sorted({*self._said, *found}, key=repr):
            allowed = self.allowed(key)
            is_free = isinstance(key, tuple) and key[0] == ignored and None in allowed
            if found.get(key) not in allowed and not is_free:
                problems.append(f"{key}: found {found.get(key)}, it may be {allowed}")
        return problems

    def settle(self, found: Mapping[Key, Value]) -> None:
        """What is found is what was told from now on."""
        self._said = {key: [Said(value, 0, 0)] for key, value in found.items()}
