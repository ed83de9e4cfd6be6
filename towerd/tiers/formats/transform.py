"""TransformChoice: which coding of which basis the rows of each level are transform-coded in, and what that
was measured to cost, as the catalog keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from towerd.codec.errors import NewerVersion
from towerd.drift import Drift
from towerd.slots.errors import StateError
from towerd.store import Store
from towerd.store.rows.collect import CODING_META
from towerd.store.segments.coded_format import coding_of
from towerd.tiers.formats.calibration import LEVELS, REACHES, FormatCost
from towerd.tiers.formats.fidelity import LevelFormats

log = logging.getLogger(__name__)

VERSION = 1


class TransformCost(msgspec.Struct, frozen=True):
    """What one fidelity's codings cost."""

    levels: tuple[str, ...]
    """The format of each level, level 0 first; deeper levels take the last one."""
    cost: FormatCost
    """Of all levels together, out of the block formats that rows are in before."""
    bits: float
    """Mean bits of a stored value, heads and checksums included, without the basis."""
    bound: float
    """What the excess had to stay within."""

    @property
    def formats(self) -> LevelFormats:
        """The table. Of a prompt that many share each level's coding reaches as far as it was measured."""
        deeper = self.levels[-1:] * (LEVELS - len(self.levels))
        return LevelFormats((*self.levels, *deeper), REACHES)

    @property
    def drift(self) -> Drift:
        """What rows in these codings drift, not too low at 95 %."""
        floor = self.cost.floor_kl
        return Drift(floor + max(0.0, self.cost.excess_max), floor)


class TransformChoice(msgspec.Struct, frozen=True):
    """What was learned for one row identity."""

    version: int
    basis: str
    """Its name."""
    n_tokens: int
    """Tokens that it was learned from."""
    made_unix: float
    basis_bytes: int
    choices: Mapping[str, TransformCost]
    """Fidelity (`near`, `small`) -> codings; none for a fidelity that no coding keeps the bound of."""
    why: str = ""
    """Why nothing could be learned; "" if something was."""

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def load_transform(store: Store, row_identity: str) -> TransformChoice | None:
    """What was learned for a row identity (its digest in hex); None if nothing was, or its basis is gone, of
    a later version, or without these codings. Raises StoreError."""
    text = store.get_meta(CODING_META + row_identity)
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=TransformChoice)
        named = {coding_of(name) for each in found.choices.values() for name in each.levels}
    except (msgspec.DecodeError, StateError) as error:
        log.warning("stored transform codings cannot be read", extra={"error": str(error)})
        return None
    if found.version != VERSION or not all(each.levels for each in found.choices.values()):
        return None
    if not named:
        return found
    try:
        basis = store.rows.bases.get(found.basis, bytes.fromhex(row_identity))
    except (StateError, NewerVersion, OSError):
        return None
    return found if named <= {(each, found.basis) for each in basis.codings} else None


def save_transform(store: Store, row_identity: str, found: TransformChoice) -> None:
    """Keep what was learned durably, in place of what was before. Raises DiskFull or StoreError."""
    store.set_meta(CODING_META + row_identity, msgspec.json.encode(found).decode())
