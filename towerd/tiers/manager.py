"""Moves rows between the tiers, within byte budgets, off the critical path.

    live --gaps/accept--> hot --writer thread--> warm --warm budget--> tokens only
    live <--plan/compose-- hot, warm                 warm --after use--> hot
                        warm --unused--> warm in block formats --longer--> transform-coded
                                       warm, worth least, space short --> warm in smaller ones

The inference thread asks `plan` and `gaps` (tree look-ups) and hands rows over with `accept`; `compose` runs on
the engine's workers; writing, promoting, evicting and re-encoding run on one thread here.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.drift import DecodedRun, Drift
from towerd.errors import DiskFull, RowsDamaged, StoreError
from towerd.slots.labels import Labels
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows
from towerd.store import Handle, Node, RowsPart, SegmentFile, Store
from towerd.store.rows.rows import lacks
from towerd.store.segments.coded_format import is_coded
from towerd.store.tree.scope import is_public
from towerd.store.tree.tree import Listener
from towerd.system.ram_limit import RamLimit
from towerd.tiers.composer import Composer, Piece
from towerd.tiers.eviction import Evictor, rows_bytes
from towerd.tiers.formats.calibration import (
    REACHES,
    Calibration,
    SqueezedFormat,
    bound_of,
    remember_squeezed,
    remember_that_it_squeezed,
    squeezed_format,
    was_squeezed,
)
from towerd.tiers.formats.fidelity import Fidelity, LevelFormats
from towerd.tiers.formats.stored_drift import StoredDrift, stored_drift
from towerd.tiers.formats.transform import TransformCost
from towerd.tiers.giving_back import RowsGiver
from towerd.tiers.moved_limits import MovedLimits, save_moved_limits
from towerd.tiers.plan import Composed, Gap, RestorePlan, merge_adjacent
from towerd.tiers.prefetch import Prefetcher
from towerd.tiers.promotion import Promoter
from towerd.tiers.ranking import Ranking
from towerd.tiers.shrink import DEFAULT_ENDS, Shrinker
from towerd.tiers.writer import RowsWriter, TierCounters, find_node, worst_stored
from towerd.tokens import Ids, Provenance, Provenances, count_approximate, count_unmoved, origin_of

log = logging.getLogger(__name__)

_RETRY_WRITE_S = 30.0
PRESSED_SHARE = 0.9
"""From this share of the warm budget on, space is short."""
SQUEEZED_SHARE = 0.5
"""Share of the rows on disk, those that are worth least, that are squeezed where space is short."""


class Tiers(Listener):
    """The hot and warm tiers of one store, informed of its changes. All methods are thread-safe."""

    def __init__(
        self,
        store: Store,
        layout: KVLayout,
        *,
        v_trans: bool,
        hot_bytes: int,
        warm_bytes: int,
        policy: str,
        predictor: Path | None = None,
        fidelity: Fidelity = "near",
        forced: LevelFormats | None = None,
        shrink_after_s: float = 600.0,
        transform_after_s: float = math.inf,
        promote_delay_s: float = 30.0,
        prefetch_bytes: int = 0,
        pinned_bytes: int = 0,
        ranks_live: bool = False,
        thaws_ahead: bool = False,
        tail: bytes = b"",
        ram: RamLimit | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """predictor: a trained predictor, for policies that use one
        forced: the stored format of each level; overrides `set_formats`
        shrink_after_s, transform_after_s: how long rows must be unused before they are stored in these
            formats, and transform-coded; below 0: they never are
        promote_delay_s: rows that were read from disk are copied into RAM when the request that
            needed them is recorded, or after this long
        pinned_bytes: RAM that rows of pinned segments may take, if it is more than `hot_bytes`
        ranks_live: see `Ranking`; prefetch_bytes, thaws_ahead: see `Prefetcher`; tail: bytes that every composed blob must end with;
        ram: what gives way to its limit; None: there is none"""
        self.store, self.layout, self.warm_bytes_max = store, layout, warm_bytes
        self.ram = ram or RamLimit(address_max=0)
        self.hot_bytes_max, self.pinned_bytes_max = hot_bytes, pinned_bytes
        self.counters = TierCounters()
        self.ranking = Ranking(policy, store, clock, predictor, ranks_live=ranks_live)
        self.prefetcher = Prefetcher(self.ranking, prefetch_bytes, clock, thaws_ahead=thaws_ahead)
        self._lock = threading.Lock()
        lent = store.state.directory.files.buffers
        self._composer = Composer(layout, v_trans=v_trans, tail=tail, room=self.ram.room, lent=lent)
        self._work: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._idle_due = 0.0
        """time.monotonic() at which failed writes are retried."""
        self.fidelity, self.exact = fidelity, fidelity == "exact"
        self._sufficient = Provenance.EXACT if self.exact else Provenance.APPROXIMATE
        """Stored rows that are worse than this are replaced once there are better ones."""
        self._shrinker = Shrinker(store, shrink_after_s, clock, transform_after_s)
        waiting = shrink_after_s, clock, self._shrinker
        self._writer = RowsWriter(store, self.counters, self._sufficient, *waiting)
        self.evictor = Evictor(store, self.ranking, self.counters, self._writer.unwritten)
        self.giver = RowsGiver(self.ram, self._composer, self.evictor, self._writer, self._work.put)
        self._promoter = Promoter(store, self.counters, self._copied_max, promote_delay_s)
        store.disk.rows_leave_by(self.evictor.evict_warm, lambda: rows_bytes(store))
        self.moved_limits: MovedLimits | None = None
        """What deviations of moved rows stay under; None: not measured, so that none are moved."""
        self._forced = forced
        self._found: Calibration | None = None
        self._squeezed: SqueezedFormat | None = None
        self._transform: TransformCost | None = None
        self._stored_drift: tuple[StoredDrift, StoredDrift] | None = None
        """Before any rows are squeezed, and afterwards."""
        self._shrinker.set_formats(None if self.exact else forced, enabled=not self.exact)
        with store.locked():
            store.listen(self)
            self.ranking.found(store.nodes())
            self._reserve(node for node in store.nodes() if node.file is not None)
        self._work.put(("look", None))  # there may be more than fits now
        self._thread = threading.Thread(target=self._run, name="towerd-tiers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is only in RAM, flush use times, end the thread."""
        self._work.put(("stop", None))
        self._thread.join()

    def set_formats(
        self,
        formats: LevelFormats | None,
        found: Calibration | None = None,
        squeezed: SqueezedFormat | None = None,
    ) -> None:
        """Store unused rows in these formats from now on, which `found` measured; None: natively. squeezed: the
        smaller one that what is worth least is put into where space is short. Other rows already stored in other
        formats stay as they are. No effect under exact fidelity or forced formats."""
        if not self.exact and self._forced is None:
            self._found, self._squeezed = found, squeezed
            self._set_shrinker(formats)

    def set_transform(self, found: TransformCost | None) -> None:
        """Transform-code rows after longer disuse from now on, in these codings; None: none are. No effect
        under exact fidelity or forced formats."""
        if not self.exact and self._forced is None and self._shrinker.may_transform:
            self._transform = found
            self._set_shrinker(self.formats)

    def pause_transform(self, pause: Callable[[], object]) -> None:
        """Call `pause` every few milliseconds of transform coding: it raises CodingInterrupted if a request runs."""
        self._shrinker.pause = pause

    def _set_shrinker(self, formats: LevelFormats | None) -> None:
        squeezed, transform, found = self._squeezed, self._transform, self._found
        ever = remember_squeezed(self.store, squeezed)
        for name in () if transform is None else dict.fromkeys(transform.levels):
            assert transform is not None
            ever = remember_squeezed(self.store, SqueezedFormat(name, transform.drift))
        self._shrinker.set_formats(
            formats,
            enabled=True,
            ends=DEFAULT_ENDS if found is None else found.choices[self.fidelity].ends,
            squeezed=None if squeezed is None else squeezed.name,
            transform=None if transform is None else transform.formats,
            ever_squeezed=[name for name in ever if not is_coded(name)],
            was_squeezed=was_squeezed(self.store),
        )
        self._stored_drift = None
        if found is not None:
            costs = [stored_drift(found, self.fidelity, ever, each) for each in (False, True)]
            self._stored_drift = costs[0], costs[1]
        self._work.put(("look", None))

    def use(self, found: Calibration) -> None:
        """Store unused rows from now on in the formats that were found for this fidelity."""
        choice = found.choices.get(self.fidelity)
        if choice is not None:
            formats = LevelFormats(choice.levels, REACHES)
            self.set_formats(formats, found, squeezed_format(found, self.fidelity))

    @property
    def moved_bound(self) -> float:
        """What answers from moved rows may drift by over the model's noise, in nats; 0: there are none."""
        limits = self.moved_limits
        return 0.0 if limits is None else bound_of(self.fidelity, limits.floor_kl)

    def tighten_moves(self, excess: float) -> None:
        """Keep fewer rows behind changed text, since served answers drifted by `excess` on average,
        which is beyond the bound."""
        limits = self.moved_limits
        if limits is None:
            return
        self.moved_limits = limits.tighter()
        log.warning(
            "answers from moved rows drift more than estimated; fewer are kept from now on",
            extra={"excess": excess, "bound": self.moved_bound},
        )
        with suppress(DiskFull):  # it holds until the next start all the same
            save_moved_limits(self.store, self.moved_limits)

    @property
    def stored_drift(self) -> StoredDrift | None:
        """What rows in stored formats cost; None if that was not measured."""
        found, is_squeezed = self._stored_drift, self._shrinker.has_squeezed
        return None if found is None else found[is_squeezed]

    def drift_of(
        self,
        is_decoded: npt.NDArray[np.bool_],
        live: Sequence[DecodedRun],
        coming: Sequence[DecodedRun],
        n_prompt: int,
    ) -> Drift | None:
        """See `StoredDrift.of`; None if it was not measured."""
        costs = self.stored_drift
        return None if costs is None else costs.of(is_decoded, live, coming, n_prompt)

    @property
    def formats(self) -> LevelFormats | None:
        """The current formats."""
        return self._shrinker.formats

    # ---- rows in (towards live) -------------------------------------------------------------

    def plan(
        self,
        path: Handle,
        start: int,
        stop: int | None = None,
        *,
        worst: Provenance = Provenance.AFTER_MOVED,
    ) -> RestorePlan:
        """The stored rows from token `start` of a request's path on, up to token `stop`. worst: the
        worst provenance that is accepted; under exact fidelity it is EXACT"""
        worst = min(worst, Provenance.EXACT) if self.exact else worst
        parts: tuple[RowsPart, ...] = ()
        with self.store.locked():  # a split would leave its upper part out
            match = path.match(stop)
            if match.n > start:
                parts = tuple(self.store.plan_rows(match, start, match.n, worst=worst))
        parts = self._within_bound(parts, path.n)
        public = takewhile(lambda node: is_public(node.scope), match.nodes)
        n_public = max((min(node.p1, match.n) for node in public), default=0)
        n_hot = sum(p.p1 - p.p0 for p in parts if p.tier == "hot")
        n_all = sum(p.p1 - p.p0 for p in parts)
        if match.nodes:
            self.store.touch(match.nodes[-1])
        n_approximate = sum(count_approximate(p.provenance) for p in parts)
        return RestorePlan(start, parts, n_hot, n_all - n_hot, n_public, n_approximate, match.n)

    def _within_bound(self, parts: tuple[RowsPart, ...], n_prompt: int) -> tuple[RowsPart, ...]:
        """The first of the stored rows, as far as their formats cost a prompt of `n_prompt` tokens no more
        than the bound: nearly all of it may be what was measured as a part of longer ones."""
        costs, decoded = self.stored_drift, [run for part in parts for run in part.decoded]
        if costs is None or not decoded:
            return parts
        n = costs.n_within(decoded, n_prompt)
        return tuple(replace(part, p1=min(part.p1, n)) for part in parts if part.p0 < n)

    def compose(self, plan: RestorePlan, places: Labels | None = None) -> Iterator[Composed]:
        """Read, check and join the planned rows, one blob at a time. The iteration ends early at
        damaged or evicted rows, and at stored rows that the context's format cannot hold.

        places: int32[n], where the context is to have the prompt's tokens; None: at their index"""
        try:
            yield from self._composer.blobs(self.rows(plan), places)
        except ValueError as error:
            log.warning("stored rows cannot be decoded", extra={"error": str(error)})

    def recycle(self, composed: Composed) -> None:
        """Give the blob's buffer back once llama.cpp has copied it."""
        self._composer.recycle(composed)

    def rows(self, plan: RestorePlan) -> Iterator[Piece]:
        """The planned rows as they are stored, piece by piece, each with its part of the plan.
        Ends early as `compose` does. The views stay readable."""
        with self._shrinker.reading(part.source for part in plan.parts):
            yield from self._readable(plan.parts)

    def filed(self, path: Handle, start: int, stop: int) -> list[RowsPart]:
        """The exact rows of tokens [start, stop) of a request's path that are in files."""
        parts = []
        with self.store.locked():
            match = path.match(stop)  # its last node may be of another text from `n` on
            for node in match.nodes:
                p0, p1 = max(start, node.p0), min(match.n, node.p1)
                if node.file is None or p0 >= p1:
                    continue
                if node.file.worst(p0, p1) <= Provenance.EXACT:
                    parts.append(RowsPart(node, p0, p1, "warm", node.file))
        return parts

    def mapped(self, parts: Iterable[RowsPart]) -> list[KVRows]:
        """The native rows among these, checked, as views of their files, which stay readable while the
        views are there. Those that cannot be read are left out."""
        found: list[KVRows] = []
        for part in parts:
            try:
                found += [
                    rows for rows in self.store.rows.load_each(part) if rows.layout == self.layout
                ]
            except (RowsDamaged, StoreError) as error:
                log.warning("stored rows cannot be mapped", extra={"error": str(error)})
        return found

    def _readable(self, parts: tuple[RowsPart, ...]) -> Iterator[Piece]:
        """The parts' rows up to the first that cannot be read; warm ones are promoted later."""
        at = 0
        try:
            for part in merge_adjacent(parts):
                for rows in self.store.rows.load_each(part):
                    yield replace(part, p0=rows.p0, p1=rows.p1), rows
                    at = rows.p1
        except RowsDamaged as error:
            log.warning("stored rows cannot be used; prefilling", extra={"error": str(error)})
            self.counters.damaged += 1
        except StoreError as error:
            log.error("stored rows cannot be read", extra={"error": str(error)})
        if warm := [part.node for part in parts if part.tier == "warm" and part.p1 <= at]:
            self._promoter.read(warm)
            self._work.put(("look", None))

    def base_tokens(self, ids: Ids, scope: str) -> int:
        """Length of the deepest pinned base that `ids` begins with."""
        match = self.store.match(ids, scope)
        return max((n.p1 for n in match.nodes if n.pinned and n.p1 <= match.n), default=0)

    def visited(self, end: Node, arrived_s: float, n_rows: int | None = None) -> Node:
        """Note that a request which arrived at `arrived_s` was recorded; its tower ends with
        `end`. `n_rows`: how many of its tokens have rows or get some; None: all. Returns the node
        by which the policies know the visit: the last node with rows, or the tree's root."""
        n_rows = end.p1 if n_rows is None else n_rows
        last = end
        with self.store.locked():
            while last.p1 > n_rows and last.hot is None and last.file is None:
                assert last.parent is not None
                last = last.parent
            path = last.path()
            self.ranking.visited(
                path,
                arrived_s,
                lambda node: self._hot_bytes(node, n_rows),
                lambda node: self._warm_bytes(node, n_rows),
            )
            is_due = self._promoter.used(path)
        if is_due:
            self._work.put(("look", None))
        self.ranking.settle()
        return last

    def _hot_bytes(self, node: Node, n_rows: int) -> int:
        """The bytes that a node's rows take in RAM, now or soon; 0 if none are expected there."""
        if node.hot is not None:
            return node.hot.nbytes
        if node.file is None:
            return self.store.bytes_of(node) if node.p1 <= n_rows else 0
        return self.store.ram_bytes(node) if self._promoter.waits(node) else 0

    def _warm_bytes(self, node: Node, n_rows: int) -> int:
        """The bytes that a node's rows take on disk, now or soon; 0 if none are expected there."""
        if node.file is not None:
            return self.store.state.file_bytes(node)
        return self.store.bytes_of(node) if node.hot is not None or node.p1 <= n_rows else 0

    # ---- rows out (from live) ---------------------------------------------------------------

    def gaps(self, ids: Ids, scope: str, provenance: Provenances | None = None) -> list[Gap]:
        """Recorded runs along `ids` whose live rows the store lacks: it has neither hot nor warm ones,
        or worse ones (under exact fidelity: none that are exact; else: moved ones).

        provenance: of the live rows. Segments with a row that comes from a stored format or was
        computed over a partial live set are left out: such rows must never pass for rows that
        prefill computed. Moved rows are for segments of `scope` that have none at all, and never for
        public ones; a segment that they begin in is cut there first."""
        if provenance is None:
            provenance = np.zeros(len(ids), np.uint8)
        if 0 < (n_unmoved := count_unmoved(provenance)) < len(ids):
            self.cut(ids[:n_unmoved], scope)
        runs: list[tuple[Provenance, list[Node]]] = []
        with self.store.locked():  # a split would leave its upper part out
            match = self.store.match(ids, scope)
            for node in match.nodes:
                live = provenance[node.p0 : node.p1]
                if node.p1 > match.n or not self._lacks(node, scope, live):
                    continue
                origin = origin_of(live)
                if runs and runs[-1][0] == origin and runs[-1][1][-1] is node.parent:
                    runs[-1][1].append(node)
                else:
                    runs.append((origin, [node]))
            return [Gap(tuple(run), run[0].p0, run[-1].p1, origin) for origin, run in runs]

    def cut(self, ids: Ids, scope: str) -> None:
        """Split a segment at the end of `ids`, if `ids` is recorded and ends within it, and its rows
        are not sufficient."""
        with self.store.locked():  # a gc in between would have it insert what was deleted
            match = self.store.match(ids, scope)
            last = match.nodes[-1] if match.nodes else None
            if last is not None and match.n == len(ids) < last.p1:
                if lacks(worst_stored(last), Provenance.EXACT, self._sufficient):
                    self.store.insert(ids, scope, [len(ids)])

    def _lacks(self, node: Node, scope: str, live: Provenances) -> bool:
        """Whether the live rows of `node`, of which `live` is the provenance, must be exported."""
        worst = Provenance(int(live.max()))
        if worst in (Provenance.MOVED, Provenance.AFTER_MOVED):
            is_own = node.scope == scope and not is_public(scope)
            return is_own and not self.exact and not node.has_rows
        return worst < Provenance.APPROXIMATE and lacks(worst_stored(node), worst, self._sufficient)

    def accept(self, gap: Gap, rows: KVRows) -> None:
        """Take exported rows of a gap into the hot tier and queue them for writing."""
        self.store.rows.attach_hot(gap.nodes, rows, origin=gap.origin)
        self._work.put(("write", gap.nodes[-1]))

    def stepped(self) -> None:
        """A workflow has taken a step, or is over: the ranking was told."""
        if self.prefetcher.is_on:
            self._work.put(("look", None))

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted so far is written (or failed to be), but no longer than that."""
        done = threading.Event()
        self._work.put(("flush", done))
        done.wait(timeout_s)

    def _copied_max(self) -> int:
        return self.giver.promoted_bytes_max(self.hot_bytes_max)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters for /metrics and /towerd/v1/stats."""
        c, formats = self.counters, self.store.state.formats
        return {
            "hot_bytes": self.store.state.hot_bytes,
            "hot_bytes_max": self.hot_bytes_max,
            "warm_bytes": self.store.state.warm_bytes,
            "warm_bytes_max": self.warm_bytes_max,
            "warm_quantized_bytes": formats.quantized_bytes,
            "warm_coded_bytes": formats.coded_bytes,
            "moved_bytes": formats.moved_bytes,
            "dropped_bytes": self.store.state.dropped_bytes,
            "segments_shrunk": self._shrinker.n_shrunk,
            "segments_kept": self._shrinker.n_kept,
            "segments_squeezed": self._shrinker.n_squeezed,
            "segments_transformed": self._shrinker.n_transformed,
            "level_formats": str(self.formats) if self.formats is not None else "",
            "unwritten_segments": len(self._writer.unwritten),
            **self.prefetcher.stats(),
            "damaged_segments": c.damaged + self._shrinker.n_damaged,
            **c.stats(),
        }

    def check_integrity(self) -> None:
        """AssertionError unless the store and everything that tracks it are consistent."""
        with self.store.locked():
            self.store.check_integrity()
            self.ranking.check_integrity()
            known = {node.id for node in self.store.nodes()}
            assert self._writer.unwritten <= known, "removed segments are queued for writing"

    # ---- store events, under its lock --------------------------------------------------------

    def split(self, lower: Node, upper: Node) -> None:
        """See Listener.split. Work pending for `lower` is now pending for both."""
        self.ranking.split(lower, upper)
        self._promoter.split(lower, upper)
        with self._lock:
            if lower.id in self._writer.unwritten:
                self._writer.unwritten.add(upper.id)
                self._work.put(("write", lower))

    def removed(self, node: Node) -> None:
        self.ranking.removed(node)
        self._promoter.forget(node)
        with self._lock:
            self._writer.unwritten.discard(node.id)

    def _reserve(self, nodes: Iterable[Node]) -> None:
        """Be ready to restore the longest conversation: an idle daemon that has none takes no memory for that."""
        self._composer.reserve(max((node.p1 for node in nodes), default=0))

    def became_hot(self, nodes: Sequence[Node]) -> None:
        self.ranking.became_hot(nodes)
        self._reserve(nodes)
        with self._lock:
            self._writer.unwritten.update(
                node.id for node in nodes if self._writer.is_unwritten(node)
            )

    def left_hot(self, node: Node) -> None:
        self.ranking.left_hot(node)
        with self._lock:
            self._writer.unwritten.discard(node.id)

    def became_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        self.ranking.became_warm(file, nodes)
        with self._lock:
            self._writer.unwritten.difference_update(
                node.id for node in nodes if not self._writer.is_unwritten(node)
            )

    def left_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        self.ranking.left_warm(file, nodes)

    # ---- the tier thread --------------------------------------------------------------------

    def _run(self) -> None:
        kind = ""
        while kind != "stop":
            try:
                kind, item = self._work.get(timeout=self._idle_s())
            except queue.Empty:
                kind, item = ("idle" if time.monotonic() >= self._idle_due else "look"), None
            try:
                self._do(kind, item)
                self.ranking.settle()
                self._promoter.step()
                self._writer.write_due()
                self._enforce()
                if kind != "stop" and self._work.empty():
                    if self._shrink():
                        self._enforce()  # a file that is not squeezed any more may be larger
                    self.prefetcher.step(self._has_rows)
            except StoreError as error:
                self.counters.write_errors += 1
                log.error("a segment could not be written", extra={"error": str(error)})
            except Exception:
                log.exception("tier thread")
            if kind in ("flush", "give"):
                item.set()

    def _do(self, kind: str, item: Any) -> None:
        if kind == "idle":
            self._idle_due = time.monotonic() + _RETRY_WRITE_S
        if kind == "write" and not self._writer.is_limited:
            self._writer.write_path(item)
        elif kind in ("idle", "flush", "stop"):
            if kind != "idle" or not self._writer.is_limited:
                self._writer.write_remaining()
            self.store.flush()
            if kind != "flush":
                self.ranking.keep(now=kind == "stop")
        elif kind == "give":
            self.giver.give(self.pinned_bytes_max)

    def _idle_s(self) -> float:
        waits = self._shrinker.wait_s(), self.prefetcher.wait_s(), self._promoter.wait_s()
        return min(_RETRY_WRITE_S, self._writer.due_s(), *waits)

    def _has_rows(self, node_id: int) -> bool:
        node = find_node(self.store, node_id)
        return node is not None and node.has_rows

    def _shrink(self) -> bool:
        """Re-encode at most one file; returns whether it did."""
        done = self._shrinker.step()
        bytes_max = self.store.disk.rows_bytes_max(self.warm_bytes_max)
        if self.store.state.warm_bytes <= PRESSED_SHARE * bytes_max:
            self._shrinker.relax()
        elif done is None:
            share = int(SQUEEZED_SHARE * self.store.state.warm_bytes)
            had_squeezed = self._shrinker.has_squeezed
            done = self._shrinker.squeeze(lambda: self.evictor.least_valuable(share))
            if self._shrinker.has_squeezed and not had_squeezed:
                remember_that_it_squeezed(self.store)
        if done is not None:
            self.counters.bytes_written += done.nbytes
        return done is not None

    def _enforce(self) -> None:
        """Evict hot rows that have a file, then files, until both budgets hold."""
        self.evictor.evict_hot(self.hot_bytes_max, self.pinned_bytes_max)
        if self._writer.is_limited:
            most = max(self.hot_bytes_max, self.pinned_bytes_max)
            self.evictor.evict_waiting(most, self._writer.write_leaving)
        self.evictor.evict_warm(self.warm_bytes_max)
