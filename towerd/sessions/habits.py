"""Habits: whether the prompts of a client always diverge at one place, so that it is told once."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

LOOKED_AT = 8
OFTEN = 5
CLIENTS_MAX = 256


@dataclass(slots=True)
class ClientHabits:
    """Where the last prompts of one client diverged, and what it was told of."""

    places: deque[Hashable] = field(default_factory=lambda: deque(maxlen=LOOKED_AT))
    told: set[Hashable] = field(default_factory=set)


class Habits:
    """Where the last prompts of each client diverged. Bounded: clients that were not seen for longest are
    forgotten. Not thread-safe."""

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, ClientHabits] = OrderedDict()

    def note(self, client: Hashable, place: Hashable) -> bool:
        """Note a prompt of which a stored conversation has more than its beginning; place: where it
        diverged, None if it did not. Returns whether it is time to tell the client: OFTEN of its last
        LOOKED_AT diverged there, and it was not told yet."""
        known = self._clients.setdefault(client, ClientHabits())
        self._clients.move_to_end(client)
        if len(self._clients) > CLIENTS_MAX:
            self._clients.popitem(last=False)
        known.places.append(place)
        if place is None or place in known.told or known.places.count(place) < OFTEN:
            return False
        known.told.add(place)
        return True
