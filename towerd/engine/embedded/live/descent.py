"""Descent: where the rows of a chat go that has reached the last place of its context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from towerd.retention import Positions
from towerd.slots.layout import KVLayout
from towerd.slots.rope import Rope
from towerd.slots.rows import Bytes2D
from towerd.slots.shift import turn_keys


@dataclass(frozen=True, slots=True)
class Descent:
    """The rows at the places from `down` on go down by as many."""

    down: int
    rope: Rope
    """Of the layers of the rows."""
    rot_k: bool
    """See `towerd.slots.shift.shift`."""

    def moves(self, places: Positions) -> Positions:
        """The indices of those of `places` that are left."""
        return np.flatnonzero(places >= self.down)

    def places(self, places: Positions) -> Positions:
        """Where the rows at `places` are afterwards."""
        return np.where(places >= self.down, places - self.down, places)

    def keys(
        self, keys: Mapping[int, Bytes2D], layout: KVLayout, places: Positions
    ) -> dict[int, Bytes2D]:
        """Keys of some layers, by number in `layout`, rotated from `places`, int64[n] in any order, to where
        they are afterwards. Raises StateError for keys that are not finite numbers."""
        to = self.places(places)
        return turn_keys(keys, layout, places[None, None], to, self.rope, rot_k=self.rot_k)
