"""The smaller format that rows are put into where space is short, before they have to leave."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import msgspec

from towerd.drift import Drift, combined
from towerd.errors import DiskFull
from towerd.store import Store
from towerd.tiers.formats.calibration import BOUNDS, Calibration


@dataclass(frozen=True, slots=True)
class SqueezedFormat:
    """A stored format, and the drift of rows that were in the formats of their levels before."""

    name: str
    drift: Drift


def squeezed_format(found: Calibration, fidelity: str) -> SqueezedFormat | None:
    """The smallest format that a conversation may be encoded in once more, after the format that
    `fidelity` chose for it; None if none is smaller.

    Errors of the two encodings add up, so both together must stay within the bound of `small`, up
    to the ends of their 95 % intervals."""
    first = found.choices[fidelity]
    candidates = [
        (found.choices["small"].levels[-1], found.choices["small"].cost),
        *found.grid.uniform.items(),
    ]
    for name, cost in sorted(candidates, key=lambda each: found.bits[each[0]]):
        excess = max(0.0, first.cost.excess_max) + max(0.0, cost.excess_max)
        if found.bits[name] < found.bits[first.levels[-1]] and excess <= BOUNDS["small"]:
            both = [Drift(each.kl, each.floor_kl) for each in (first.cost, cost)]
            return SqueezedFormat(name, combined(both))
    return None


def remember_squeezed(store: Store, squeezed: SqueezedFormat | None) -> dict[str, Drift]:
    """The largest drift of each format that rows of this model were ever squeezed into, `squeezed`
    among them from now on: what was squeezed keeps its drift whatever is measured later."""
    key = f"squeezed:{store.state.digest.hex()}"
    found = msgspec.json.decode(store.get_meta(key) or "{}", type=dict[str, Drift])
    if squeezed is None:
        return found
    before = found.get(squeezed.name)
    if before is None or before.kl < squeezed.drift.kl:
        found[squeezed.name] = squeezed.drift
        with suppress(DiskFull):  # told until the next start all the same
            store.set_meta(key, msgspec.json.encode(found).decode())
    return found
