"""MovedLimits: by how much rows may deviate behind other text before a run is evaluated instead.

Measured per model in idle time, over changes of many kinds and sizes: the deviation of a run's blocks
against what keeping the run costs an answer. That grows with the mean square of the deviation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from towerd.drift import Drift
from towerd.kernels import dispatch
from towerd.slots.rows import KVRows
from towerd.store import Store
from towerd.tiers.formats.calibration import bound_of

log = logging.getLogger(__name__)

BLOCK_TOKENS = 8
"""Tokens of a block. Many short blocks tell more than a few long ones: what rows deviate by differs from
place to place."""
_BLOCKS = 8
"""Blocks of a long run, at equal distances from its first token on."""
STRETCH_TOKENS_MIN = 16
"""The fewest tokens between two blocks: fewer are not worth a step of their own."""
_LAYERS_SHARE = 0.2
"""The share of the layers that are compared, the last ones: there, changes that matter to an answer and others
lie twice as far apart as over all layers (SmolLM2)."""
_ALONE = 0.25
"""How much the first block of a run counts that has no other."""
VERSION = 2
_TIGHTENED = 0.7


@dataclass(slots=True)
class RunProfile:
    """How far a run of `n` tokens deviates behind other text than before."""

    n: int
    deviations: list[float] = field(default_factory=list)
    """Of its blocks, in order, as far as they were evaluated and allowed to keep it."""
    is_cut: bool = False
    """Only its beginning is kept: there are no more blocks."""


def block_offsets(n: int) -> list[int]:
    """Where the blocks of a run of `n` tokens begin, ascending from 0."""
    offsets = [0]
    for i in range(1, _BLOCKS):
        at = i * n // _BLOCKS
        end = offsets[-1] + BLOCK_TOKENS
        if at - end >= STRETCH_TOKENS_MIN and n - at - BLOCK_TOKENS >= STRETCH_TOKENS_MIN:
            offsets.append(at)
    return offsets


def deviation(evaluated: KVRows, kept: KVRows) -> float:
    """By how much rows differ from those that were kept for the same positions, relative to their
    size: the mean over tokens and the last layers of V, or of K in a cache without V."""
    layout = evaluated.layout
    planes, n_layers = layout.planes, len(layout.v or layout.k)
    found = []
    for i in range(len(planes) - max(1, round(n_layers * _LAYERS_SHARE)), len(planes)):
        name = planes[i].format.name
        a, b = (_floats(rows.plane(i), name) for rows in (evaluated, kept))
        size = np.maximum(np.linalg.norm(b, axis=1), 1e-9)
        found.append(float((np.linalg.norm(a - b, axis=1) / size).mean()))
    return float(np.mean(found))


def _floats(rows: np.ndarray, name: str) -> np.ndarray:
    rows = np.ascontiguousarray(rows)
    return (rows if name == "f32" else dispatch.transcoded(rows, name, "f32")).view(np.float32)


def spread(run: RunProfile, noise: float) -> float:
    """The mean square of what a run deviates by, over the noise, as far as its first blocks tell. The
    first one does not count, since the first tokens deviate behind any change, unless it is the only one."""
    squares = [max(0.0, found**2 - noise**2) for found in run.deviations]
    n_later = (len(run.deviations) if run.is_cut else len(block_offsets(run.n))) - 1
    return sum(squares[1:]) / n_later if n_later > 0 else _ALONE * squares[0]


class MovedLimits(msgspec.Struct, frozen=True):
    """What was measured of one row identity."""

    row_identity: str
    """Its digest, hex."""
    floor_kl: float
    """The model's noise on the tokens that were compared, in nats."""
    noise: float
    """The deviation of rows behind the same text, evaluated in other batches."""
    slope: float
    """Nats over the noise if rows had a `spread` of 1."""
    tightened: float = 1.0
    """What the bound is multiplied by, since served answers drifted more than was estimated."""

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def allows(self, fidelity: str, run: RunProfile) -> bool:
        """Whether a run may be kept, as far as its first blocks tell. Its share of the prompt does not
        count: a short run whose rows deviate wins little, and may mean something else."""
        bound = self.tightened * bound_of(fidelity, self.floor_kl)
        return self._excess(run) <= bound

    def estimate(self, runs: Iterable[RunProfile], n_prompt: int) -> Drift:
        """The drift of keeping these runs of a prompt."""
        excess = sum(run.n / n_prompt * self._excess(run) for run in runs)
        return Drift(self.floor_kl + excess, self.floor_kl)

    def _excess(self, run: RunProfile) -> float:
        return self.slope * spread(run, self.noise)

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
