"""The live tier: which sequences of the context hold which tokens, and which cells they share.

A sequence's cells are a list of runs. A run is a group of cells that were made together and is
shared by every sequence that was branched from it:

    seq 3   [ base run: 1,000 cells ][ own run: 40 ]
    seq 7   [ base run: 1,000 cells ][ own run: 512 ]      cells used: 1,552, not 2,552

A run belongs to all its owners and its cells are free when the last one lets go. Truncating or
branching inside a run splits it into two (for all owners), so that a run is always whole.

A sequence with a budget may be partial: it lacks positions, and its runs are those of its live
cells in the order of their positions. It is never shared with other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from towerd.drift import DecodedRun
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.context.places import Places
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.live_set import EVERYTHING, BoundedSet, LiveSet
from towerd.engine.embedded.live.parked import Parked
from towerd.engine.live_index import LiveIndex
from towerd.errors import Unavailable
from towerd.retention import Positions
from towerd.slots.rows import KVRows
from towerd.store.tree.scope import adapters_of
from towerd.tiers.prefetch import Prefetch
from towerd.tokens import (
    Ids,
    Provenance,
    Provenances,
    computed_after,
    count_approximate,
    count_unmoved,
)

_PREFETCHED = -1e-9
"""How a prefetched sequence stands that was not used yet: after what is over, before all else."""


@dataclass(eq=False, slots=True)
class CellRun:
    """`n` cells shared by `owners` (sequence ids)."""

    n: int
    owners: set[int]


@dataclass(eq=False, slots=True)
class LiveSeq:
    """One sequence of the context."""

    id: int
    scope: str
    ids: Ids
    """int32 buffer; the first `n` entries are the tokens whose rows are in the context."""
    n: int = 0
    n_public: int = 0
    """How many leading tokens belong to public bases, and may be shared with other tenants."""
    dirty: bool = False
    """Some of its rows may not be in the store yet."""
    busy: bool = False
    is_whole: bool = True
    """False while rows are loaded whose state checkpoint is still to follow."""
    session: str | None = None
    end: int | None = None
    """The last node of the prefix tree that it has, by which the policy ranks it; None: it is unknown
    there. Until its next export it is that of the turn before."""
    prefetch: Prefetch | None = None
    """What it was made for, as long as no request has used it."""
    n_before: int = 0
    """How many of its first tokens were live before that."""
    last_used: int = 0
    runs: list[CellRun] = field(default_factory=list)
    n_reserved: int = 0
    """Cells that its windows need beyond those of its live tokens."""
    states: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Its state checkpoints that the store may lack, by position."""
    provenance: Provenances = field(default_factory=lambda: np.zeros(0, np.uint8))
    """uint8 buffer beside `ids`: how each token's rows came to be."""
    decoded: tuple[DecodedRun, ...] = ()
    """What its approximate rows were decoded from, later ones in place of earlier ones; where its
    provenance says otherwise, rows were evaluated since."""
    live_set: LiveSet = EVERYTHING
    """Which of its tokens are live."""
    places: Places = field(default_factory=Places)
    """Where tokens behind pictures are, in a model with M-RoPE."""

    @property
    def awaits_step(self) -> bool:
        """Whether it was prefetched for a step of a workflow that is still to come."""
        return self.prefetch is not None and not self.prefetch.is_over

    @property
    def is_partial(self) -> bool:
        """See LiveSet.is_partial."""
        return self.live_set.is_partial

    @property
    def was_only_loaded(self) -> bool:
        """Whether no row was computed over a partial live set, so that stored rows may follow: it
        is partial because its load was interrupted."""
        was_moved = self.live_set.place_of(self.n) != self.n
        return not was_moved and not (self.provenance[: self.n] == Provenance.PARTIAL).any()

    @property
    def n_cells(self) -> int:
        """Tokens that are live."""
        return self.live_set.n_cells(self.n)

    @property
    def place_next(self) -> int:
        """The context's position for its next token."""
        return self.place_of(self.n)

    def place_of(self, n: int) -> int:
        """The first place in the context after those of the tokens before `n`, which is not within a
        medium. A chat with a budget has no media."""
        return self.places.of(self.live_set.place_of(n))

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """See `Holder.rank`: live before parked, then idle, which can be taken over without a branch,
        then the shorter, then the last used."""
        return 1, not self.busy, -self.n, self.last_used

    def n_visible(self, scope: str) -> int:
        """See `Holder.n_visible`."""
        if self.scope == scope:
            return self.n
        is_alike = adapters_of(self.scope) == adapters_of(scope)
        return min(self.n, self.n_public) if is_alike else 0

    def tokens(self) -> Ids:
        """View of the live tokens, int32[n]."""
        return self.ids[: self.n]

    def n_approximate(self) -> int:
        """Live tokens whose rows were decoded from a stored format, moved or computed from moved
        ones."""
        return count_approximate(self.provenance[: self.n])

    def n_unmoved(self) -> int:
        """Leading tokens before the first that was moved or computed from moved ones."""
        return count_unmoved(self.provenance[: self.n])


class LivePool:
    """Hands out sequence ids [0, n_seqs) and keeps the cell account.

    The owner must call `append` after every decode or state append and may rely on
    `cells_used` being what the context holds (`check_integrity`, and the engine's tests
    against the context itself)."""

    def __init__(
        self,
        memory: SequenceMemory,
        *,
        n_seqs: int,
        n_cells: int,
        has_places: bool = False,
        on_drop: Callable[[LiveSeq], None] = lambda seq: None,
    ) -> None:
        """has_places: whether tokens of a medium may share a place (M-RoPE); on_drop: called for each
        sequence that has left the context"""
        self._memory = memory
        self._on_drop = on_drop
        self.has_places = has_places
        self.n_cells = n_cells
        self.cells_used = 0
        self._free = list(range(n_seqs - 1, -1, -1))
        self._live: dict[int, LiveSeq] = {}
        self._clock = 0
        self.index: LiveIndex[LiveSeq | Parked] = LiveIndex()
        """Its sequences, and the chats that left them for RAM."""

    def __iter__(self) -> Iterator[LiveSeq]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def cells_free(self) -> int:
        return self.n_cells - self.cells_used

    def n_busy(self) -> int:
        """Sequences of requests that run, or that have ended and are not recorded yet."""
        return sum(seq.busy for seq in self._live.values())

    def cells_busy(self) -> int:
        """Cells that running sequences hold, alone or with others."""
        busy = [seq for seq in self._live.values() if seq.busy]
        runs = {id(run): run.n for seq in busy for run in seq.runs}
        return sum(runs.values()) + sum(seq.n_reserved for seq in busy)

    def cells_awaiting(self) -> int:
        """Cells that idle sequences hold for steps that are still to come, and no running sequence does."""
        found = [seq for seq in self._live.values() if seq.awaits_step and not seq.busy]
        runs = {id(run): run for seq in found for run in seq.runs}
        return sum(
            run.n
            for run in runs.values()
            if not any(self._live[owner].busy for owner in run.owners)
        )

    def n_own_cells(self, seq: LiveSeq) -> int:
        """Cells of `seq` that no other sequence shares."""
        return sum(run.n for run in seq.runs if len(run.owners) == 1)

    def n_busy_cells(self, seq: LiveSeq, n: int) -> int:
        """How many of the cells of the first `n` tokens of `seq` running sequences hold."""
        n_left, n_busy = seq.live_set.rank(n), 0
        for run in seq.runs:
            if any(self._live[owner].busy for owner in run.owners):
                n_busy += min(run.n, n_left)
            n_left -= run.n
            if n_left <= 0:
                break
        return n_busy

    def touch(self, seq: LiveSeq) -> None:
        """Make `seq` the most recently used."""
        self._clock += 1
        seq.last_used = self._clock

    def has_room(self, n_cells: int, evict: Callable[[], bool]) -> bool:
        """Have idle sequences evicted until `n_cells` are free; False if that is not enough. `evict`
        frees one, if there is one."""
        while self.cells_free < n_cells:
            if not evict():
                return False
        return True

    def has_own(self, seq: LiveSeq, n_cells: int, evict: Callable[[], bool]) -> bool:
        """Have idle sequences evicted until `seq` can have `n_cells` cells of its own, beside those that it
        shares, which become its own when the others leave; False if that is not enough."""
        while self.cells_free < n_cells - self.n_own_cells(seq):
            if not evict():
                return False
        return True

    def require_own(self, seq: LiveSeq, n_cells: int, evict: Callable[[], bool]) -> None:
        """As `has_own`. Raises Unavailable if that is not enough."""
        if not self.has_own(seq, n_cells, evict):
            raise Unavailable("The live context is full of running requests; try again later.")

    def can_open(self) -> bool:
        return bool(self._free)

    def open(self, scope: str, capacity: int) -> LiveSeq:
        """A new empty sequence that can hold `capacity` tokens. Needs `can_open()`."""
        assert self._free, "no free sequence: ask can_open() and evict first"
        seq = LiveSeq(self._free.pop(), scope, np.zeros(capacity, np.int32))
        seq.provenance = np.zeros(capacity, np.uint8)
        self._live[seq.id] = seq
        self.index.add(seq)
        self.touch(seq)
        return seq

    def branch(self, src: LiveSeq, n: int, scope: str, capacity: int) -> LiveSeq:
        """A new sequence that shares the first `n` cells of `src`. Needs `can_open()`."""
        assert 0 < n <= src.n
        n_cells, place = src.live_set.rank(n), src.place_of(n)
        self._split_at(src, n_cells)
        dst = self.open(scope, capacity)
        dst.ids[:n] = src.ids[:n]
        dst.provenance[:n] = src.provenance[:n]
        dst.decoded = src.decoded
        dst.n = n
        dst.n_public = min(src.n_public, n)
        length = 0
        for run in src.runs:
            if length == n_cells:
                break
            run.owners.add(dst.id)
            dst.runs.append(run)
            length += run.n
        dst.live_set = src.live_set.fork()
        _cut_live_set(dst, n)
        dst.places = src.places.fork(n)
        self._memory.seq_cp(src.id, dst.id, 0, place)
        self.reserve(dst)
        return dst

    def append(self, seq: LiveSeq, ids: Ids, provenance: Provenances | None = None) -> None:
        """Account for `ids` whose cells the context has just filled, after `seq`'s last.

        provenance: what the rows are, uint8[n]; None: they were computed, from what was there"""
        n = len(ids)
        assert 0 < n <= len(seq.ids) - seq.n, "sequence over its capacity"
        seq.ids[seq.n : seq.n + n] = ids
        if provenance is None and seq.is_partial:
            seq.provenance[seq.n : seq.n + n] = Provenance.PARTIAL
        else:
            computed = computed_after(seq.provenance[: seq.n]) if provenance is None else provenance
            seq.provenance[seq.n : seq.n + n] = computed
        seq.live_set.extend(n)
        if self.has_places:
            seq.places.extend(ids, seq.n)
        seq.n += n
        self.cells_used += n
        last = seq.runs[-1] if seq.runs else None
        if last is not None and last.owners == {seq.id}:
            last.n += n
        else:
            seq.runs.append(CellRun(n, {seq.id}))

    def grow(self, seq: LiveSeq, capacity: int) -> None:
        """Let `seq` hold `capacity` tokens."""
        if capacity > len(seq.ids):
            more = capacity - len(seq.ids)
            seq.ids = np.concatenate([seq.ids, np.zeros(more, np.int32)])
            seq.provenance = np.concatenate([seq.provenance, np.zeros(more, np.uint8)])

    def truncate(self, seq: LiveSeq, n: int) -> None:
        """Keep the first `n` tokens of `seq`."""
        if n >= seq.n:
            return
        place = seq.place_of(n)
        self._cut(seq, [(seq.live_set.rank(n), seq.n_cells)])
        _cut_live_set(seq, n)
        seq.places.truncate(n)
        seq.n = n
        seq.n_public = min(seq.n_public, n)
        self._memory.seq_rm(seq.id, place, -1)

    def evict(self, seq: LiveSeq, live: BoundedSet, stay: Positions) -> int:
        """Evict the live tokens of `seq` that are not in `stay`; their places stay empty. `live` is
        its live set. Returns the number of evicted tokens."""
        runs, places = live.runs_beside(stay), live.places
        if not runs:
            return 0
        seq.n_public = min(seq.n_public, int(live.kept[runs[0][0]]))
        self._cut(seq, runs)
        self._merge_own(seq)
        live.drop(stay)
        spans = [(int(places[start]), int(places[end - 1]) + 1) for start, end in runs]
        with broken_by_failure(live):
            self._memory.thin(seq.id, spans)
        self.reserve(seq)
        return sum(end - start for start, end in runs)

    def rewrite(
        self,
        seq: LiveSeq,
        rows: KVRows,
        evict: Callable[[], bool],
        beside: Buffer | None = None,
    ) -> None:
        """Let `rows` be all live rows of `seq`, whose live set accounts for them afterwards. Raises
        Unavailable, with nothing changed, if no cells can be freed, and TowerdError.

        beside: what it has beside them from now on; None: as before"""
        self.require_own(seq, len(rows), evict)
        beside = self._memory.beside(seq.id) if beside is None else beside
        seq.n_public = 0
        with broken_by_failure(seq.live_set):
            self._let_go_all(seq)
            self._memory.replace(seq.id, rows, beside)
        self.take(seq, len(rows))
        self.reserve(seq)

    def pack(self, seq: LiveSeq) -> None:
        """Write the rows of `seq`, which shares none, again as they are: into cells side by side. Raises
        TowerdError."""
        blob = self._memory.context.get_state(seq.id)
        with broken_by_failure(seq.live_set):
            self._let_go_all(seq)
            self._memory.append(seq.id, blob, is_empty=True)
        self.take(seq, seq.n_cells)
        self.reserve(seq)

    def take(self, seq: LiveSeq, n: int) -> None:
        """Account for `n` cells that the context has put into `seq`, which had none."""
        assert not seq.runs
        seq.runs.append(CellRun(n, {seq.id}))
        self.cells_used += n

    def reserve(self, seq: LiveSeq) -> None:
        """Account for what the windows of a partial sequence hold beyond its live tokens."""
        n_beside = self._memory.n_beside(seq.id) if seq.is_partial else 0
        n_reserved = max(0, n_beside - self.n_own_cells(seq))
        self.cells_used += n_reserved - seq.n_reserved
        seq.n_reserved = n_reserved

    def drop(self, seq: LiveSeq) -> None:
        """Free the sequence and the cells only it holds."""
        for run in seq.runs:
            self._let_go(run, seq)
        seq.runs = []
        self.cells_used -= seq.n_reserved
        self._memory.seq_rm(seq.id, -1, -1)
        del self._live[seq.id]
        self.index.remove(seq)
        self._free.append(seq.id)
        self._on_drop(seq)

    def first_to_leave(
        self, standings: Mapping[int, float], *, spare_prefetched: bool = False
    ) -> LiveSeq | None:
        """The idle sequence that leaves first: of those that the policy knows the one that stands lowest, by
        LRU among equals. One that it does not know leaves in its place if it was used longer ago, but
        after those that are not expected to be used again, and what was prefetched for nobody yet.

        standings: see `Ranking.live_standings`; empty: LRU alone. spare_prefetched: leave out what was
        prefetched for steps that are still to come"""
        lowest: tuple[float, int, LiveSeq] | None = None
        oldest: LiveSeq | None = None
        for seq in self._live.values():
            if seq.busy or (spare_prefetched and seq.awaits_step):
                continue
            standing = None if seq.end is None else standings.get(seq.end)
            if standing is None and seq.prefetch is not None:
                standing = _PREFETCHED
            if standing is None:
                if oldest is None or seq.last_used < oldest.last_used:
                    oldest = seq
            elif lowest is None or (standing, seq.last_used) < lowest[:2]:
                lowest = standing, seq.last_used, seq
        if lowest is None or oldest is None:
            return oldest if lowest is None else lowest[2]
        standing, used, known = lowest
        return known if standing < 0.0 or used < oldest.last_used else oldest

    def first_over(self, standings: Mapping[int, float]) -> LiveSeq | None:
        """The first to leave, if it is not expected to be used again."""
        seq = self.first_to_leave(standings)
        is_over = seq is not None and seq.end is not None and standings.get(seq.end, 0.0) < 0.0
        return seq if is_over else None

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, if the account of cells is inconsistent."""
        runs: dict[int, CellRun] = {}
        for seq in self._live.values():
            assert sum(r.n for r in seq.runs) == seq.n_cells, f"runs of sequence {seq.id}"
            assert 0 <= seq.n_public <= seq.n
            seq.live_set.check_integrity(seq.n)
            for run in seq.runs:
                assert run.n > 0, f"an empty run of sequence {seq.id}"
                assert seq.id in run.owners, f"a run of sequence {seq.id}"
                runs[id(run)] = run
        for run in runs.values():
            for owner in run.owners:
                assert owner in self._live, f"owner {owner} is gone"
                assert any(r is run for r in self._live[owner].runs), f"owner {owner} lost a run"
        n_reserved = sum(seq.n_reserved for seq in self._live.values())
        assert sum(r.n for r in runs.values()) + n_reserved == self.cells_used, "cells_used"
        assert not set(self._free) & set(self._live), "a sequence is free and live"

    def _let_go_all(self, seq: LiveSeq) -> None:
        """Free all cells of `seq`, which stays open; `take` accounts for what is put there."""
        self._cut(seq, [(0, seq.n_cells)])
        self._memory.seq_rm(seq.id, -1, -1)

    def _let_go(self, run: CellRun, seq: LiveSeq) -> None:
        run.owners.discard(seq.id)
        if not run.owners:
            self.cells_used -= run.n

    def _cut(self, seq: LiveSeq, spans: Sequence[tuple[int, int]]) -> None:
        """Release the cells [start, end) of `seq`, for each of `spans`, which ascend."""
        self._split_at(seq, *(cell for span in spans for cell in span))
        length, next_span = 0, 0
        keep: list[CellRun] = []
        for run in seq.runs:
            while next_span < len(spans) and spans[next_span][1] <= length:
                next_span += 1
            if next_span < len(spans) and spans[next_span][0] <= length:
                self._let_go(run, seq)
            else:
                keep.append(run)
            length += run.n
        seq.runs = keep

    def _merge_own(self, seq: LiveSeq) -> None:
        """Merge adjacent runs that only `seq` owns."""
        runs: list[CellRun] = []
        for run in seq.runs:
            if runs and runs[-1].owners == run.owners == {seq.id}:
                runs[-1].n += run.n
            else:
                runs.append(run)
        seq.runs = runs

    def _split_at(self, seq: LiveSeq, *cells: int) -> None:
        """Split runs so that each of the `cells` of `seq`, which ascend, begins a run in every
        owner.

        The cells of one run are consecutive and in the same order in all its owners."""
        start, i = 0, 0
        for run in list(seq.runs):
            end, first = start + run.n, i
            while i < len(cells) and cells[i] < end:
                i += 1
            self._split(run, [cell - start for cell in cells[first:i] if cell > start])
            start = end

    def _split(self, run: CellRun, lengths: Sequence[int]) -> None:
        """Split a run after each of `lengths` cells, which ascend and are less than its length."""
        if not lengths:
            return
        ends = [*lengths[1:], run.n]
        lower = [CellRun(end - n, set(run.owners)) for n, end in zip(lengths, ends, strict=True)]
        run.n = lengths[0]
        for owner in run.owners:
            runs = self._live[owner].runs
            at = next(i for i, r in enumerate(runs) if r is run) + 1
            runs[at:at] = lower


def _cut_live_set(seq: LiveSeq, n: int) -> None:
    """Cut the live set of a sequence after its first `n` tokens, which may be all live again then."""
    seq.live_set.truncate(n)
    if not (seq.provenance[:n] == Provenance.PARTIAL).any():
        seq.live_set.note_computed_whole()


@contextmanager
def broken_by_failure(live: LiveSet) -> Iterator[None]:
    """Wraps a change of a chat's rows, which may leave none: no request may continue it then."""
    try:
        yield
    except Exception as error:
        if isinstance(live, BoundedSet):
            live.failure = error
            live.n_evictions += 1  # it is not whole any more
        raise
