"""MovedLimits: by how much rows may deviate behind other text before a run is evaluated instead.

Measured per model in idle time, over changes of many kinds and sizes: the deviation of a run's blocks
against what keeping the run costs an answer. That grows with the mean square of the deviation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from towerd.drift import Drift
from towerd.kernels import dispatch
from towerd.slots.rows import KVRows
from towerd.store import Store
from towerd.tiers.formats.calibration import bound_of

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Tokens of a block: enough for a steady mean, and one step of a few milliseconds."""
_SECOND = 48
_SHARES = (0.125, 0.25, 0.5, 0.75)
"""Where blocks of a run begin: at its first token, soon after that, and at shares of its length. What a
change before the run does to its rows fades along the run, fast at first."""
STRETCH_TOKENS_MIN = 32
"""The fewest tokens between two blocks: fewer are not worth a step of their own."""
_ALONE = 0.25
"""How much the first block of a run counts that has no other."""
VERSION = 1
_TIGHTENED = 0.7


Profile: TypeAlias = tuple[int, Sequence[float]]
"""A run: its tokens, and the deviations of its blocks, as far as they were evaluated."""


def block_offsets(n: int) -> list[int]:
    """Where the blocks of a run of `n` tokens begin, ascending from 0."""
    offsets = [0]
    for at in (_SECOND, *(int(share * n) for share in _SHARES)):
        end = offsets[-1] + BLOCK_TOKENS
        if at - end >= STRETCH_TOKENS_MIN and n - at - BLOCK_TOKENS >= STRETCH_TOKENS_MIN:
            offsets.append(at)
    return offsets


def deviation(evaluated: KVRows, kept: KVRows) -> float:
    """By how much rows differ from those that were kept for the same positions, relative to their
    size: the mean over tokens and layers of V, or of K in a cache without V."""
    first = evaluated.layout.n_layer if evaluated.layout.v else 0
    planes = evaluated.layout.planes
    found = []
    for i in range(first, len(planes)):
        name = planes[i].format.name
        a, b = (_floats(rows.plane(i), name) for rows in (evaluated, kept))
        size = np.maximum(np.linalg.norm(b, axis=1), 1e-9)
        found.append(float((np.linalg.norm(a - b, axis=1) / size).mean()))
    return float(np.mean(found))


def _floats(rows: np.ndarray, name: str) -> np.ndarray:
    rows = np.ascontiguousarray(rows)
    return (rows if name == "f32" else dispatch.transcoded(rows, name, "f32")).view(np.float32)


def spread(n: int, deviations: Sequence[float], noise: float) -> float:
    """The mean square of what a run of `n` tokens deviates by, over the noise, as far as its first
    blocks tell. A token counts by how far behind the change it is, from 0 to 2: an answer reads what is
    near, and the first tokens deviate behind any change. Between two blocks the mean of both counts, and
    behind the last one half of it. deviations: of its blocks in order, of all or of the first few"""
    offsets = block_offsets(n)
    squares = [max(0.0, found**2 - noise**2) for found in deviations]
    if len(offsets) == 1:
        return _ALONE * squares[0]
    weights = [(end**2 - at**2) / n**2 for at, end in zip(offsets, [*offsets[1:], n], strict=True)]
    after = [*squares[1:], 0.0]
    parts = zip(weights, squares, after, strict=False)
    return sum(weight * (one + two) / 2 for weight, one, two in list(parts)[1:])


class MovedLimits(msgspec.Struct, frozen=True):
    """What was measured of one row identity."""

    row_identity: str
    """Its digest, hex."""
    floor_kl: float
    """The model's noise on the tokens that were compared, in nats."""
    noise: float
    """The deviation of rows behind the same text, evaluated in other batches."""
    slope: float
    """Nats over the noise if a whole prompt had a `spread` of 1."""
    tightened: float = 1.0
    """What the bound is multiplied by, since served answers drifted more than was estimated."""

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def allows(self, fidelity: str, runs: Iterable[Profile], n_prompt: int) -> bool:
        """Whether these runs of a prompt may be kept, as far as their first blocks tell."""
        bound = self.tightened * bound_of(fidelity, self.floor_kl)
        return self._excess(runs, n_prompt) <= bound

    def estimate(self, runs: Iterable[Profile], n_prompt: int) -> Drift:
        """The drift of keeping these runs of a prompt."""
        return Drift(self.floor_kl + self._excess(runs, n_prompt), self.floor_kl)

    def _excess(self, runs: Iterable[Profile], n_prompt: int) -> float:
        parts = (n / n_prompt * spread(n, found, self.noise) for n, found in runs)
        return self.slope * sum(parts)

    def tighter(self) -> MovedLimits:
        """Limits under which fewer runs are kept."""
        return msgspec.structs.replace(self, tightened=_TIGHTENED * self.tightened)

    def worst(self, fidelity: str) -> Drift:
        """The drift of a run that is just kept."""
        return Drift(self.floor_kl + bound_of(fidelity, self.floor_kl), self.floor_kl)


def load_moved_limits(store: Store) -> MovedLimits | None:
    """The limits of the store's row identity; None if they were not measured. Raises StoreError."""
    text = store.get_meta(_key(store))
    if text is None:
        return None
    try:
        version, found = msgspec.json.decode(text, type=tuple[int, MovedLimits])
    except msgspec.DecodeError as error:
        log.warning("stored limits of moved rows cannot be read", extra={"error": str(error)})
        return None
    return found if version == VERSION else None


def save_moved_limits(store: Store, found: MovedLimits) -> None:
    """Store limits durably in place of earlier ones. Raises DiskFull or StoreError."""
    store.set_meta(_key(store), msgspec.json.encode((VERSION, found)).decode())


def _key(store: Store) -> str:
    return f"moved:{store.state.digest.hex()}"
