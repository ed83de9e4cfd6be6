"""The live pool against a model that stores every sequence's cells explicitly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numbered_rows import make

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.live_set import EVERYTHING, BoundedSet
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.engine.embedded.longchat.shift import shift_ids
from towerd.engine.embedded.restore.branching import has_everything
from towerd.slots.rows import KVRows
from towerd.tokens import Ids, Provenance, common_prefix

N_SEQS = 5


class Cells(SequenceMemory):
    """What a unified cache does: a cell is (position, token) held by a set of sequences."""

    def __init__(self) -> None:
        self.seqs: dict[int, dict[int, int]] = {}
        self.next_cell = 0

    def write(self, seq: int, pos: int) -> None:
        self.seqs.setdefault(seq, {})[pos] = self.next_cell
        self.next_cell += 1

    def replace(self, seq: int, rows: KVRows, beside: Buffer) -> None:
        for place in rows.positions.tolist():
            self.write(seq, place)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        held = self.seqs.get(seq, {})
        end = p1 if p1 >= 0 else 1 << 31
        self.seqs[seq] = {p: c for p, c in held.items() if not max(0, p0) <= p < end}

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        part = {p: c for p, c in self.seqs[src].items() if p0 <= p < p1}
        self.seqs.setdefault(dst, {}).update(part)

    def used(self) -> int:
        return len({cell for held in self.seqs.values() for cell in held.values()})


class PoolMachine(RuleBasedStateMachine):
    """Random opens, branches, appends, truncations and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = Cells()
        self.pool = LivePool(self.cells, n_seqs=N_SEQS, n_cells=10_000)
        self.provenance: dict[int, int] = {}
        """Cell -> what its rows are."""
        self.gone: dict[tuple[int, int], int] = {}
        """(sequence, position) -> the place that was dropped, as long as nothing took it."""

    def provenances(self, seq: int) -> list[int]:
        """Of a sequence's cells, in the order of their positions."""
        return [self.provenance[cell] for _, cell in sorted(self.cells.seqs.get(seq, {}).items())]

    @precondition(lambda self: self.pool.can_open())
    @rule(scope=st.sampled_from(["a", "b"]))
    def open(self, scope: str) -> None:
        self.pool.open(scope, 64)

    @precondition(lambda self: len(self.pool) > 0)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        loaded=st.sampled_from(
            [None, Provenance.EXACT, Provenance.DERIVED, Provenance.APPROXIMATE]
        ),
    )
    def append(self, data: st.DataObject, tokens: list[int], loaded: int | None) -> None:
        """Rows are loaded and known, or computed: exactly only if all before them are exact."""
        seq = data.draw(st.sampled_from(sorted(self.pool, key=lambda s: s.id)))
        computed = Provenance.DERIVED if any(self.provenances(seq.id)) else Provenance.EXACT
        if seq.is_partial:
            computed = Provenance.PARTIAL
        for i in range(len(tokens)):
            self.provenance[self.cells.next_cell] = computed if loaded is None else loaded
            self.cells.write(seq.id, seq.place_next + i)
        self.pool.grow(seq, seq.n + len(tokens))
        provenance = None if loaded is None else np.full(len(tokens), loaded, np.uint8)
        self.pool.append(seq, np.array(tokens, np.int32), provenance)

    @precondition(lambda self: self.pool.can_open() and any(s.n for s in self.pool))
    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        src = data.draw(st.sampled_from(sorted((s for s in self.pool if s.n), key=lambda s: s.id)))
        n = data.draw(st.integers(1, src.n))
        dst = self.pool.branch(src, n, src.scope, 64)
        assert list(dst.tokens()) == list(src.tokens()[:n])

    @precondition(lambda self: any(s.n_cells for s in self.pool))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Drop some tokens of a sequence: all its others stay where they are."""
        seqs = sorted((s for s in self.pool if s.n_cells), key=lambda s: s.id)
        seq = data.draw(st.sampled_from(seqs))
        if seq.live_set is EVERYTHING:
            seq.live_set = BoundedSet.whole(LiveBudget("streaming", 16), seq.n, 1 << 20)
        live = bounded(seq)
        kept = live.kept.tolist()
        stay = data.draw(st.sets(st.sampled_from(kept), max_size=len(kept) - 1))
        before = self.cells.seqs[seq.id]
        place_of = dict(zip(kept, live.places.tolist(), strict=True))
        n_gone = self.pool.evict(seq, live, np.array(sorted(stay), np.int64))
        assert n_gone == len(kept) - len(stay)
        assert live.kept.tolist() == sorted(stay)
        self.gone |= {(seq.id, p): place_of[p] for p in kept if p not in stay}
        places = {place_of[p] for p in stay}
        assert self.cells.seqs[seq.id] == {p: c for p, c in before.items() if p in places}

    @precondition(lambda self: any(self.absent(s) for s in self.pool))
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        """Bring some back: all are written anew, and all other sequences stay as they are."""
        seqs = sorted((s for s in self.pool if self.absent(s)), key=lambda s: s.id)
        seq = data.draw(st.sampled_from(seqs))
        absent = self.absent(seq)
        back = sorted(data.draw(st.sets(st.sampled_from(sorted(absent)), min_size=1)))
        before = {s: dict(held) for s, held in self.cells.seqs.items()}
        live = bounded(seq)
        kept = live.kept.tolist()
        place_of = absent | dict(zip(kept, live.places.tolist(), strict=True))
        chosen = np.array(sorted(kept + back), np.int64)
        places = np.array([place_of[p] for p in chosen.tolist()], np.int64)
        first = self.cells.next_cell
        self.pool.rewrite(
            seq, replace(make(0, len(places)), positions=places.astype(np.int32)), bool
        )
        for i, p in enumerate(chosen.tolist()):
            self.provenance[first + i] = int(seq.provenance[p])
        every = chosen[None, None]
        live.mix(every, places[None, None], places)
        assert live.kept.tolist() == chosen.tolist()
        now = self.cells.seqs
        assert all(now[s] == held for s, held in before.items() if s != seq.id)

    def absent(self, seq: LiveSeq) -> dict[int, int]:
        """Position -> place of what was dropped of a sequence and can come back."""
        found: dict[int, int] = {}
        if seq.live_set is EVERYTHING or not seq.n_cells:
            return found
        kept, places = bounded(seq).kept.tolist(), bounded(seq).places.tolist()
        for (owner, p), place in self.gone.items():
            rank = seq.live_set.rank(p)
            free = owner == seq.id and p < kept[-1] and p not in kept
            if free and (rank == 0 or places[rank - 1] < place) and place < places[rank]:
                found[p] = place
        ordered = sorted(found)  # a later position stands at a later place
        return {
            p: found[p]
            for i, p in enumerate(ordered)
            if all(found[q] < found[p] for q in ordered[:i])
        }

    def forget(self, seq: LiveSeq, n: int) -> None:
        """What was dropped from token `n` on is not that of the tokens to come."""
        self.gone = {(s, p): place for (s, p), place in self.gone.items() if s != seq.id or p < n}

    @precondition(lambda self: len(self.pool) > 0)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.pool, key=lambda s: s.id)))
        n = data.draw(st.integers(0, seq.n))
        self.pool.truncate(seq, n)
        self.forget(seq, n)

    @precondition(lambda self: len(self.pool) > 0)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.pool, key=lambda s: s.id)))
        self.pool.drop(seq)
        self.forget(seq, 0)

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=12), scope=st.sampled_from("ab"))
    def look_up(self, ids: list[int], scope: str) -> None:
        wanted = np.array(ids, np.int32)
        found = self.pool.index.longest(wanted, scope, has_everything)
        lengths = [
            common_prefix(s.tokens() if s.scope == scope else s.tokens()[: s.n_public], wanted)
            for s in self.pool
            if not s.is_partial
        ]
        assert found.n == found.n_common == max(lengths, default=0)
        assert (found.source is None) == (found.n == 0)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        assert self.pool.cells_used == self.cells.used()
        for seq in self.pool:
            held = self.cells.seqs.get(seq.id, {})
            assert len(held) == seq.n_cells
            provenances = self.provenances(seq.id)
            if isinstance(seq.live_set, BoundedSet):
                assert sorted(held) == seq.live_set.places.tolist()
                assert seq.provenance[seq.live_set.kept].tolist() == provenances
            else:
                assert seq.provenance[: seq.n].tolist() == provenances
                assert seq.n_approximate() == provenances.count(Provenance.APPROXIMATE)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def _ids(n: int) -> Ids:
    return np.arange(n, dtype=np.int32)


def test_shift_keeps_the_base_and_the_newest() -> None:
    """A shifted prompt fits, begins with the base and ends with the newest tokens."""
    for n in (100, 128, 190, 1000):
        out = shift_ids(_ids(n), 128, 20)
        assert len(out) < 128 or n < 128
        assert list(out[:20]) == list(range(20))
        assert out[-1] == n - 1


def test_shift_is_stable_while_a_chat_grows() -> None:
    """Turns between two shifts keep the same prefix, so that it can be reused."""
    previous = shift_ids(_ids(130), 128, 20)
    changes = 0
    for n in range(131, 240):
        out = shift_ids(_ids(n), 128, 20)
        changes += int(common_prefix(previous, out) < len(previous))
        previous = out
    assert changes <= 3


def test_the_first_to_leave() -> None:
    """The lowest standing, LRU among equals and among those that the policy does not know."""
    pool = LivePool(Cells(), n_seqs=6, n_cells=100)
    a, b, c, d, e, f = (pool.open("s", 8) for _ in range(6))
    f.busy = True
    assert pool.first_to_leave({}) is a
    a.end, b.end, d.end = 1, 2, 4
    assert pool.first_to_leave({1: 0.5, 2: 0.25, 4: 0.25}) is b
    assert pool.first_to_leave({1: 0.5, 2: 0.25, 4: -1.0}) is d
    pool.touch(b)
    assert pool.first_to_leave({1: 0.5, 2: 0.5, 4: 0.75}) is a
    assert pool.first_to_leave({1: 0.5, 2: 0.25, 4: 0.5}) is c, "it was used before b"
    for seq in (a, b, c, d, e):
        seq.busy = True
    assert pool.first_to_leave({1: -1.0}) is None
