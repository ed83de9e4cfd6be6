"""VllmStore: the store of one vLLM engine, with its tiers.

A store has one writer: the scheduler's side of the connector, in the process of the engine's core. The worker's side
never opens it, wherever it runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from towerd.connectors.vllm.model import layer_specs, layout_of, row_identity, vllm_version
from towerd.connectors.vllm.operations import SavedPath
from towerd.connectors.vllm.settings import ConnectorSettings
from towerd.errors import ConfigError, RowsDamaged, SessionDeleted, StoreError, StoreLocked
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import Bytes2D, KVRows
from towerd.store import Store
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids, Provenance, Provenances

if TYPE_CHECKING:
    from towerd.connectors.vllm.shared_rows import SharedRows

log = logging.getLogger(__name__)

WAITING_BYTES_MAX = 1 << 30
"""RAM for rows that are not on disk yet; beyond that new ones are not kept."""
POLICY = "lru"


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """Stored rows of tokens [p0, p1) of a prompt, checked."""

    p0: int
    p1: int
    pieces: tuple[KVRows, ...]
    provenance: Provenances

    @classmethod
    def nothing(cls, p0: int) -> StoredPrefix:
        """That of a prompt of which nothing is stored from `p0` on."""
        return cls(p0, p0, (), np.zeros(0, np.uint8))

    def part(self, p0: int, p1: int) -> StoredPrefix:
        """Its rows in [p0, p1), which lie within it, as views."""
        pieces = tuple(rows.slice(p0, p1) for rows in self.pieces if rows.p0 < p1 and p0 < rows.p1)
        return StoredPrefix(p0, p1, pieces, self.provenance[p0 - self.p0 : p1 - self.p0])


class VllmStore:
    """Thread-safe."""

    def __init__(self, settings: ConnectorSettings, vllm_config: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError, ModelError, StoreLocked, StoreVersion, DiskFull or StoreError."""
        self._settings = settings
        version = vllm_version()
        self.layout: KVLayout = layout_of(layer_specs(kv_cache_config))
        self.is_exact = settings.format == NATIVE
        try:
            self.store = Store.open(
                settings.store_dir,
                lambda memo: row_identity(vllm_config, self.layout, memo, version),
            )
        except StoreLocked as error:
            raise StoreLocked(
                f"{error.message}. A store has one vLLM engine: give each a towerd.store_dir of its own; they "
                "share through towerd.shared"
            ) from error
        self._tiers = Tiers(
            self.store,
            self.layout,
            v_trans=False,
            hot_bytes=settings.hot_bytes,
            warm_bytes=settings.warm_bytes,
            policy=POLICY,
            fidelity="exact" if self.is_exact else "near",
            forced=None if self.is_exact else LevelFormats((settings.format,)),
            shrink_after_s=settings.format_after_s,
        )
        self.shared: SharedRows | None = None
        self._saving = ThreadPoolExecutor(1, "towerd-save")
        self._lock = threading.Lock()
        self._staged_bytes = 0
        try:
            if settings.shared is not None:
                self.shared = self._open_shared(settings.shared)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Write what is not on disk yet and close the store."""
        self._saving.shutdown()
        if self.shared is not None:
            self.shared.close()
        self._tiers.close()
        self.store.close()

    def _open_shared(self, url: str) -> SharedRows:
        try:  # late: it takes packages that nothing else needs
            from towerd.connectors.vllm.shared_rows import open_shared_rows
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"towerd.shared needs the package {error.name}: pip install 'towerd[shared]'."
            ) from error
        return open_shared_rows(url, self._settings, self.store, self._tiers)

    def find(self, ids: Ids, scope: str, p0: int) -> StoredPrefix | None:
        """The stored rows of `ids` from token `p0` on, whose checksums are right; None if there are none."""
        with self.store.hold(ids, scope) as path:
            plan = self._tiers.plan(path, p0)
            read = list(self._tiers.rows(plan))
            if not read:
                return None
            with self.store.locked():
                match = path.match(read[-1][1].p1)
                if match.nodes:
                    self._tiers.visited(match.nodes[-1], time.time())
        pieces = tuple(rows for _, rows in read)
        provenance = np.concatenate([part.provenance for part, _ in read])
        return StoredPrefix(p0, pieces[-1].p1, pieces, provenance)

    def n_stored(self, ids: Ids, scope: str) -> int:
        """Tokens of `ids` with rows here that this engine uses, from the first on."""
        worst = Provenance.EXACT if self.is_exact else Provenance.AFTER_MOVED
        with self.store.locked():
            parts = self.store.plan_rows(self.store.match(ids, scope), 0, len(ids), worst=worst)
        return parts[-1].p1 if parts else 0

    @property
    def room_rows(self) -> int:
        """How many rows may wait to be written beside those that do."""
        hot = max(0, self.store.state.hot_bytes - self._settings.hot_bytes)
        left = WAITING_BYTES_MAX - self._staged_bytes - hot
        return max(0, left // self.layout.token_bytes)

    def save(self, what: SavedPath, planes: Sequence[Bytes2D]) -> None:
        """Store rows that were read from the cache, in the background. planes: as `StoredPlanes`."""
        positions, n = np.arange(what.p0, len(what.ids), dtype=np.int32), self.layout.n_layer
        rows = KVRows(self.layout, positions, tuple(planes[:n]), tuple(planes[n:]))
        with self._lock:
            self._staged_bytes += rows.nbytes
        try:
            self._saving.submit(self._save, what, rows)
        except RuntimeError:  # closed
            log.info("rows came after the store was closed")

    def flush(self) -> None:
        """Wait until what was saved so far is on disk."""
        self._saving.submit(lambda: None).result()
        self._tiers.flush()

    def _save(self, what: SavedPath, rows: KVRows) -> None:
        try:
            self._enter(what, rows)
        except (StoreError, RowsDamaged, SessionDeleted) as error:
            log.warning("rows were not stored: %s", error.message)
        except Exception:
            log.exception("rows were not stored")
        finally:
            with self._lock:
                self._staged_bytes -= rows.nbytes

    def _enter(self, what: SavedPath, rows: KVRows) -> None:
        ids, scope = what.ids, what.scope
        ends: Sequence[int] = sorted({rows.p0, len(ids)} - {0})
        end = self.store.insert(ids, scope, ends)[-1]
        for gap in self._tiers.gaps(ids, scope, what.provenance):
            if gap.p0 >= rows.p0:  # else it left the store since the rows were chosen
                self._tiers.accept(gap, rows.slice(gap.p0, gap.p1))
        with self.store.locked(), suppress(StoreError):
            self._tiers.visited(end, time.time())
        if self.shared is not None:
            self.shared.put(ids, scope)
