"""State checkpoints go to a bucket and come from it: what arrives is what was there, at its place, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from store_tools import OTHER_MODEL, ROW_IDENTITY, check_rows, turn_of, write_all

from towerd.errors import SessionDeleted
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.shared import objects
from towerd.tiers.shared.bucket import open_bucket
from towerd.tiers.shared.objects import CheckpointPlace, PutRows
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids

IDS = np.arange(100, 160, dtype=np.int32)
N_BYTES = 5000


def state_of(position: int, salt: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng([position, salt]).integers(0, 256, N_BYTES).astype(np.uint8)


@dataclass
class Machine:
    store: Store
    states: CheckpointTier
    tier: SharedTier

    def take(self, ids: Ids, *positions: int, scope: str = "local", derived: bool = False) -> None:
        """Checkpoints of a recorded path."""
        self.store.insert(ids, scope, [len(ids)])
        self.states.keep(ids, scope, {n: (state_of(n), derived) for n in positions})

    def found(self, ids: Ids, scope: str = "local") -> list[int]:
        """The positions of those here, each checked."""
        self.states.flush()
        match = self.store.match(ids, scope)
        nodes = [node for node in match.nodes if node.p1 <= match.n]
        there = [at for node in nodes if (at := self.states.table.at(node)) is not None]
        for each in there:
            assert np.array_equal(self.states.load(each), state_of(each.position))
        return [each.position for each in there]


class Fleet:
    """Machines with one bucket."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack, self._n = root, stack, 0

    def machine(
        self,
        identity: RowIdentity = ROW_IDENTITY,
        *,
        master: bytes = bytes(32),
        exact: bool = False,
        has_rows: bool = False,
    ) -> Machine:
        self._n += 1
        store = self._stack.enter_context(Store.open(self.root / str(self._n), identity))
        states = CheckpointTier(store, bytes_max=1 << 30, exact=exact)
        self._stack.callback(states.close)
        tier = SharedTier(
            store,
            open_bucket(f"file://{self.root}/bucket"),
            master,
            "exact" if exact else "near",
            has_rows=has_rows,
            checkpoints=states,
        )
        return Machine(store, states, tier)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def test_the_last_ones_arrive(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts; what is there is not sent again, and what is here is not fetched again."""
    monkeypatch.setattr(objects, "PART_BYTES", 1 << 11)
    one, two = fleet.machine(), fleet.machine()
    one.take(IDS, 10, 30, 50)
    put = one.tier.put_path(IDS, "local")
    assert [each.position for each in put.checkpoints] == [30, 50]
    assert put.n_tokens == 50
    sent = one.tier.counters.bytes_put
    assert one.tier.put_path(IDS, "local") == put
    assert one.tier.counters.bytes_put == sent
    two.tier.fetch_path(put, IDS, "local")
    assert two.found(IDS) == [50]
    assert two.tier.n_stored(IDS, "local") == 50
    n_fetched = two.tier.counters.fetched
    two.tier.fetch_path(put, IDS, "local")
    assert two.tier.counters.fetched == n_fetched
    assert two.tier.put_path(IDS, "local").n_tokens == 50
    other = np.concatenate([IDS[:45], [7, 8]]).astype(np.int32)
    two.tier.fetch_path(put, other, "local")
    assert two.found(other) == [30]


def test_found_by_tokens(fleet: Fleet) -> None:
    ids = np.arange(900, dtype=np.int32)
    one, two = fleet.machine(), fleet.machine()
    one.take(ids, 300, 700)
    one.tier.put_path(ids, "local")
    later = np.concatenate([ids, [5, 6]]).astype(np.int32)
    found = two.tier.find(later, "local", 0)
    assert found is not None
    two.tier.fetch_path(found.put, later, "local")
    assert two.found(later) == [700]
    early = np.concatenate([ids[:400], [5, 6]]).astype(np.int32)
    found = two.tier.find(early, "local", 0)
    assert found is not None
    two.tier.fetch_path(found.put, early, "local")
    assert two.found(early) == [300]


def test_rows_and_states_go_together(fleet: Fleet) -> None:
    """A hybrid resumes where it has both: no rows go that no state follows, no state without its rows."""
    one, two = fleet.machine(has_rows=True), fleet.machine(has_rows=True)
    one.store.insert(IDS[:40], "local", [40])
    write_all(one.store, one.store.match(IDS[:40], "local").nodes[-1])
    one.store.insert(IDS, "local", [60])
    assert one.tier.put_path(IDS, "local") == PutRows()
    one.take(IDS, 25, 50)
    put = one.tier.put_path(IDS, "local")
    assert ([each.position for each in put.checkpoints], put.n_rows) == ([25], 40)
    two.tier.fetch_path(put, IDS, "local")
    assert two.found(IDS) == [25]
    assert check_rows(two.store, two.store.match(IDS, "local").nodes[-1]) >= 25
    assert two.tier.n_stored(IDS, "local") == 25


def test_what_is_refused(fleet: Fleet) -> None:
    """Damage, other tokens, other models, other keys, a place that another state is said to be at."""
    one = fleet.machine()
    one.take(IDS, 30, 50)
    put = one.tier.put_path(IDS, "local")
    last = put.checkpoints[-1]
    moved = PutRows(checkpoints=[CheckpointPlace(put.checkpoints[0].name, *_facts(last))])
    for machine, places in (
        (fleet.machine(), moved),
        (fleet.machine(master=bytes(31) + b"x"), put),
        (fleet.machine(OTHER_MODEL), put),
    ):
        machine.tier.fetch_path(places, IDS, "local")
        assert machine.found(IDS) == []
    two = fleet.machine()
    two.tier.fetch_path(put, IDS + 1, "local")
    assert two.found(IDS + 1) == []
    part = fleet.root / "bucket" / "objects" / last.name / "0000"
    sound = part.read_bytes()
    for data in (sound[:-1], sound[:900] + b"x" + sound[901:], b""):
        part.write_bytes(data)
        two.tier.fetch_path(put, IDS, "local")
        assert two.found(IDS) == []
    part.unlink()
    two.tier.fetch_path(put, IDS, "local")
    assert (two.found(IDS), two.tier.counters.missing) == ([], 1)
    part.write_bytes(sound)
    two.tier.fetch_path(put, IDS, "local")
    assert two.found(IDS) == [50]
    assert one.tier.counters.damaged == 0


def _facts(place: CheckpointPlace) -> tuple[int, bytes, bool, bool, int, int]:
    of = place.position, place.chain, place.derived
    return *of, place.is_public, place.n_parts, place.n_bytes


def test_exact_daemons_take_exact_states(fleet: Fleet) -> None:
    one = fleet.machine()
    one.take(IDS, 50, derived=True)
    put = one.tier.put_path(IDS, "local")
    assert [each.derived for each in put.checkpoints] == [True]
    exact = fleet.machine(exact=True)
    exact.tier.fetch_path(put, IDS, "local")
    assert exact.found(IDS) == []


def test_a_state_of_a_deleted_chat_does_not_come_back(fleet: Fleet) -> None:
    one, two = fleet.machine(), fleet.machine()
    one.take(IDS, 50)
    put = one.tier.put_path(IDS, "local")
    two.store.commit_turn(turn_of(IDS.tolist(), [7], session="chat"))
    since = two.store.deletions.watch()
    two.store.delete_session("chat")
    with pytest.raises(SessionDeleted):
        two.tier.fetch_path(put, IDS, "local", since)
    assert two.found(IDS) == []
