"""The tier of state checkpoints, for models whose memory cannot be cut, with its own
budget.

A checkpoint is taken where a later prompt is likely to resume, kept in RAM until its file
is written, and read back when a prompt begins with the tokens before it. The checkpoints
that save the least are evicted first: those close behind another one, far from the end of
their conversation, or long unused. One where prompts diverged counts once for each way on, up to a
limit: the next prompt may diverge there, too. Checkpoints therefore stay dense
near the leaves and become sparse in the past.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.errors import StoreError
from towerd.slots.kind import StateKind
from towerd.store.rows.checkpoints import CheckpointTable, StateCheckpoint
from towerd.store.segments.checkpoint_file import ANYWHERE, CUT_META
from towerd.store.store import Store
from towerd.store.tree.handle import Handle
from towerd.store.tree.node import Node
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

AGE_S = 600.0
"""Checkpoints used within this time of each other count as equally recent."""
NEAR_TOKENS = 32
"""Minimum distance to a leaf for the ranking. The checkpoint at a leaf, where a
conversation continues, counts as if it saved this many tokens, however short the last
answer."""
WAYS_MAX = 16
"""The most ways that count: short prompts make any number of them, and those of one tenant may not
outweigh whatever others have."""


class CheckpointTier:
    """The checkpoints of one store, written on a separate thread. All methods are thread-safe."""

    def __init__(
        self,
        store: Store,
        *,
        bytes_max: int,
        exact: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """exact: never resume from a state that was computed from approximate rows"""
        self.table = CheckpointTable(store.state)
        self._store = store
        self.bytes_max = bytes_max
        self.exact = exact
        self.n_written = 0
        self.n_evicted = 0
        self.n_resumed = 0
        self._clock = clock
        self._work: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        store.disk.checkpoints_leave_by(lambda: self._work.put(("look", None)))
        self._thread = threading.Thread(target=self._run, name="towerd-checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the checkpoints that are only in RAM, and end the thread."""
        self._work.put(("stop", None))
        self._thread.join()

    def flush(self) -> None:
        """Wait until everything accepted so far is written (or failed to be)."""
        done = threading.Event()
        self._work.put(("flush", done))
        done.wait()

    def accept(self, ids: Ids, scope: str, states: Mapping[int, tuple[Bytes, bool]]) -> None:
        """Take states of prefixes of `ids`: position -> (bytes, derived)."""
        if usable := self._usable(states):
            self._work.put(("attach", (ids.copy(), scope, usable)))

    def keep(self, ids: Ids, scope: str, states: Mapping[int, tuple[Bytes, bool]]) -> None:
        """As `accept`, but they can be resumed from when this returns. Raises StoreError."""
        if usable := self._usable(states):
            self._work.put(("write", self.table.attach(ids, scope, usable)))

    def _usable(self, states: Mapping[int, tuple[Bytes, bool]]) -> dict[int, tuple[Bytes, bool]]:
        if not self._store.rows.is_trusted:
            return {}
        return {p: s for p, s in states.items() if not (self.exact and s[1])}

    def deepest(self, path: Handle, start: int, stop: int) -> StateCheckpoint | None:
        """The last state at a position in (start, stop] of a request's path."""
        if not self._store.rows.is_trusted:
            return None
        with self._store.locked():
            match = path.match(stop)
            for node in reversed(match.nodes):
                if not start < node.p1 <= match.n:
                    continue
                found = self.table.at(node)
                if found is not None and not (self.exact and found.derived):
                    return found
        return None

    def load(self, found: StateCheckpoint) -> Bytes:
        """The bytes of a checkpoint. Raises RowsDamaged or StoreError."""
        data = self.table.load(found)
        self.n_resumed += 1
        return data

    def distrust(self, since: float) -> None:
        """See `RowStore.distrust`, which must be called first."""
        self.flush()
        self.table.drop_since(since)

    def has(self, node: Node) -> bool:
        """Whether a checkpoint is at the end of a segment. Call it while the store is locked."""
        return self.table.at(node) is not None

    def forget(self, nodes: Iterable[Node]) -> None:
        """Delete the checkpoints of segments that are deleted."""
        for node in nodes:
            self.table.drop(node)

    def refused(self, found: StateCheckpoint) -> None:
        """Forget a checkpoint that llama.cpp rejects, so that it does not block others."""
        log.warning("a state checkpoint is of no use here", extra={"position": found.position})
        self.table.drop(found.node)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters for /metrics and /towerd/v1/stats."""
        return {
            "boundary_states": len(self.table),
            "boundary_bytes": self.table.file_bytes,
            "boundary_bytes_max": self.bytes_max,
            "boundaries_written": self.n_written,
            "boundary_evictions": self.n_evicted,
            "boundary_resumes": self.n_resumed,
        }

    def _run(self) -> None:
        kind = ""
        while kind != "stop":
            kind, item = self._work.get()
            try:
                nodes = self.table.attach(*item) if kind == "attach" else item
                for node in nodes if kind in ("attach", "write") else ():
                    self._write(node)
                self._enforce()
            except StoreError as error:
                log.error("a state checkpoint could not be written", extra={"error": str(error)})
            except Exception:
                log.exception("state checkpoint thread")
            if kind == "flush":
                item.set()

    def _write(self, node: Node) -> None:
        """Write a checkpoint; without a budget for it the tokens are evaluated again."""
        found = self.table.at(node)
        n_bytes = 0 if found is None or found.has_file else found.nbytes
        is_allowed = self._store.writes.allows("checkpoints", n_bytes)
        if n_bytes and not (is_allowed and self._store.disk.has_left(n_bytes)):
            self.table.drop(node)
        else:
            self.n_written += self.table.write(node) > 0

    def _enforce(self) -> None:
        self.table.sweep()
        excess = self.table.file_bytes - self._store.disk.checkpoint_bytes_max(self.bytes_max)
        if excess <= 0:
            return
        excess -= self.table.drop_foreign(excess)
        while excess > 0:
            victim = self._victim()
            if victim is None:
                return
            excess -= victim.nbytes
            self.table.drop(victim.node)
            self.n_evicted += 1

    def _victim(self) -> StateCheckpoint | None:
        states = [s for s in self.table.all() if s.has_file and not s.node.pinned]
        now = self._clock()
        with self._store.locked():
            return min(states, key=lambda state: self._worth(state, now), default=None)

    def _worth(self, found: StateCheckpoint, now: float) -> float:
        """Tokens that it saves, for each way that prompts took there, discounted by distance to the leaf and
        time since its last use."""
        gap = found.position - self._position_before(found.node)
        distance = leaf_distance(found.node)
        age = (now - found.node.last_used) // AGE_S
        saves = gap if distance else max(gap, NEAR_TOKENS)
        n_ways = min(max(1, len(found.node.children)), WAYS_MAX)
        return n_ways * saves / (NEAR_TOKENS + distance) / (1 + max(0.0, age))

    def _position_before(self, node: Node) -> int:
        above = node.parent
        while above is not None and above.parent is not None:
            if self.table.at(above) is not None:
                return above.p1
            above = above.parent
        return 0


def open_checkpoint_tier(
    store: Store, kind: StateKind, *, bytes_max: int, exact: bool
) -> CheckpointTier | None:
    """The tier of a model of this kind, None if it has no state; notes in the store where its stored
    state can be cut."""
    cut = kind.cut if kind.has_state else ANYWHERE
    store.set_meta(CUT_META + store.state.digest.hex(), cut)
    if not kind.has_state:
        return None
    return CheckpointTier(store, bytes_max=bytes_max, exact=exact)


def close_tiers(tiers: Tiers, checkpoint_tier: CheckpointTier | None) -> None:
    """Close both, what writes state checkpoints first."""
    if checkpoint_tier is not None:
        checkpoint_tier.close()
    tiers.close()


def leaf_distance(node: Node) -> int:
    """Tokens from the end of a node to the nearest end of a conversation below it. Call it
    while the store is locked."""
    level = [node]
    best: int | None = None
    while level:
        below: list[Node] = []
        for each in level:
            distance = each.p1 - node.p1
            if not each.children:
                best = distance if best is None else min(best, distance)
            elif best is None or distance < best:
                below += each.children
        level = below
    return best or 0
