"""Modules: bases that may be spliced in anywhere, and their positions in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.errors import StoreError
from towerd.slots.blob import emit_blob, parse_blob
from towerd.slots.rows import KVRows
from towerd.store import Base, Module
from towerd.store.tree.scope import public_of
from towerd.tiers.formats.calibration import allows
from towerd.tiers.manager import Tiers
from towerd.tiers.module_text import TOKENS_MIN
from towerd.tokens import Ids, Provenance

_KEY_TOKENS = 16
"""Modules are looked up by the hash of this many first ids."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

_Hashes: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PlacedModule:
    """A module found in a prompt, with its first token at position `at`."""

    base: Base
    module: Module
    at: int
    ids: Ids
    """The base's whole path, the `module.first` tokens before the module's own included."""

    @property
    def n(self) -> int:
        """Number of tokens in the module."""
        return len(self.ids) - self.module.first

    @property
    def end(self) -> int:
        return self.at + self.n


@dataclass(slots=True)
class _IndexedModule:
    """One module of the index."""

    base: Base
    module: Module
    path: Ids
    own: Ids


@dataclass(slots=True)
class _Index:
    """The modules of one scope and the public ones, longest first."""

    known: list[_IndexedModule] = field(default_factory=list)
    keys: _Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))


class Modules:
    """The modules of a store whose drift the current fidelity allows. For the inference thread:
    `find` only looks up, `rows` reads."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._version = -1
        self._bases: list[Base] = []
        self._indexes: dict[str, _Index] = {}

    def find(self, ids: Ids, scope: str) -> list[PlacedModule]:
        """The modules in `ids` that `scope` may use, by position. They do not overlap: a longer
        one wins. Empty under exact fidelity, which splices nothing."""
        index = self._index(scope)
        if not index.known or len(ids) < TOKENS_MIN:
            return []
        hashes = _hashes(ids)
        candidates = np.flatnonzero(np.isin(hashes, index.keys))
        taken = np.zeros(len(ids), np.bool_)
        found: list[PlacedModule] = []
        for key, known in zip(index.keys, index.known, strict=True):
            n = len(known.own)
            for at in candidates[hashes[candidates] == key].tolist():
                span = slice(at, at + n)
                if not taken[span].any() and np.array_equal(ids[span], known.own):
                    taken[span] = True
                    found.append(PlacedModule(known.base, known.module, at, known.path))
        return sorted(found, key=lambda placed: placed.at)

    def rows(self, placed: PlacedModule, scope: str) -> tuple[KVRows, int]:
        """The module's rows in the context's own format, at the positions at which they were
        computed, and how many of them were in RAM. Raises StoreError unless all can be read."""
        with self._tiers.store.hold(placed.ids, scope) as path:
            plan = self._tiers.plan(path, placed.module.first, worst=Provenance.APPROXIMATE)
        parts = [rows for _, rows in self._tiers.rows(plan)]
        if sum(len(part) for part in parts) != placed.n:
            message = (
                f"The rows of {placed.base.name!r} are gone; forget it with "
                "`towerctl unpin --base` and precache it again."
            )
            raise StoreError(message, public=message)
        blob = emit_blob(parts, layout=self._tiers.layout)
        return parse_blob(blob, cell_ext=self._tiers.layout.cell_ext).rows, plan.n_hot

    def _index(self, scope: str) -> _Index:
        if self._tiers.exact:
            return _Index()
        store = self._tiers.store
        if (version := store.bases.version) != self._version:
            self._bases = [base for base in store.bases.listing() if self._is_allowed(base.module)]
            self._indexes, self._version = {}, version
        if not self._bases:
            return _Index()
        if scope not in self._indexes:
            self._indexes[scope] = self._make_index(scope)
        return self._indexes[scope]

    def _is_allowed(self, module: Module | None) -> bool:
        """Modules that were measured with other rows or under a laxer fidelity stay in the store,
        unused."""
        if module is None or module.row_identity != self._tiers.store.state.digest.hex():
            return False
        return allows(self._tiers.fidelity, module.drift)

    def _make_index(self, scope: str) -> _Index:
        known = []
        for base in self._bases:
            if base.scope in (scope, public_of(scope)) and base.module is not None:
                with self._tiers.store.locked():  # a split would show half of a path
                    path = self._tiers.store.node(base.node).prefix_ids()[: base.n_tokens]
                known.append(_IndexedModule(base, base.module, path, path[base.module.first :]))
        known.sort(key=lambda each: -len(each.own))
        keys = [_hashes(each.own[:_KEY_TOKENS])[0] for each in known]
        return _Index(known, np.array(keys, np.uint64))


def _hashes(ids: Ids) -> _Hashes:
    """The hash of the `_KEY_TOKENS` ids from each position, uint64[len(ids) - _KEY_TOKENS + 1];
    empty for fewer ids."""
    n = len(ids) - _KEY_TOKENS + 1
    wide = ids.astype(np.uint64)
    out = np.zeros(max(0, n), np.uint64)
    for i in range(_KEY_TOKENS if n > 0 else 0):
        out *= _FACTOR  # wraps around, as it should
        out += wide[i : i + n]
    return out
