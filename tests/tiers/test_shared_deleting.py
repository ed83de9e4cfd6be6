"""What a collection of garbage leaves: what living records have is found, whatever went beside it or was damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from shared_world import World, WorldBucket
from store_tools import ROW_IDENTITY, write_all

from towerd.store import Store
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.shared.bucket import BucketError
from towerd.tiers.shared.deleting import collector as collector_module
from towerd.tiers.shared.naming import naming
from towerd.tiers.shared.records import RecordName
from towerd.tiers.shared.sealing import TenantKeys
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids

MASTER = bytes(range(32))
HOUR_S = 3600.0
BEGINNING = np.arange(100, 400, dtype=np.int32)
"""A system prompt of 300 tokens."""


class Machines:
    """Stores with one bucket, whose time stands still."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.world = World(0, TenantKeys.of_collector(MASTER))
        self._root, self._stack, self._n = root, stack, 0

    def tier(self, *, has_states: bool = False) -> tuple[Store, SharedTier, CheckpointTier | None]:
        self._n += 1
        store = self._stack.enter_context(Store.open(self._root / str(self._n), ROW_IDENTITY))
        states = CheckpointTier(store, bytes_max=1 << 30, exact=False) if has_states else None
        if states is not None:
            self._stack.callback(states.close)
        tier = SharedTier(
            store,
            WorldBucket(self.world),
            MASTER,
            "near",
            has_rows=not has_states,
            checkpoints=states,
            clock=lambda: self.world.now,
        )
        return store, tier, states

    def push(self, tier: SharedTier, ids: Ids, folder: str, turns: int = 1) -> None:
        """As a session after so many turns."""
        self.world.now += 60
        with tier.held():
            put = tier.put_path(ids, "local")
            of = [bytes([n]) for n in range(turns)]
            states = [each.chain for each in put.checkpoints]
            named = naming(put.objects, of, of, states, tier.way(ids, "local", put))
            content = tier.keys("local").name("record", ids.tobytes())
            model = tier.model_name("local")
            name = RecordName(turns, f"{turns:016x}", model, put.n_tokens, content)
            tier.put_record("local", folder, name, b"tower", named)

    def collect(self, tier: SharedTier, n: int = 5) -> list[collector_module.Collected]:
        """Runs, some hours apart."""
        found = []
        for _ in range(n):
            self.world.now += 2 * HOUR_S
            found.append(tier.collector().run())
        return found


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(tmp_path, stack)


def folder(letter: str) -> str:
    return f"sessions/{letter * 64}"


def reach(tier: SharedTier, ids: Ids) -> int:
    found = tier.find(ids, "local", 0)
    return 0 if found is None else found.n_tokens


def test_a_chat_is_found_after_another_with_its_beginning_was_deleted(machines: Machines) -> None:
    """The marks of the common tokens lead to rows of the first one, which go."""
    chats = [
        np.concatenate([BEGINNING, np.arange(n, n + 1200, dtype=np.int32)]) for n in (1000, 5000)
    ]
    tiers = []
    for number, ids in enumerate(chats):
        store, tier, _ = machines.tier()
        write_all(store, store.insert(ids, "local", [len(ids)])[-1])
        machines.push(tier, ids, folder("ab"[number]))
        tiers.append(tier)
    _, reader, _ = machines.tier()
    asked = [chats[1][:300], chats[1][:700], chats[1]]
    longer = np.concatenate([chats[1], np.arange(9000, 12_000, dtype=np.int32)])
    before = [reach(reader, ids) for ids in [*asked, longer]]
    assert before == [256, 512, 1280, 1280]
    tiers[0].collector().remove_folder(folder("a"))
    done = machines.collect(tiers[0])
    assert len(machines.world.places("objects")) == 1
    assert [reach(reader, ids) for ids in [*asked, longer]] == before
    assert sum(each.marks for each in done) == 1
    found = reader.find(asked[0], "local", 0)
    assert found is not None
    reader.fetch_path(found.put, asked[0], "local", n_common=found.n_tokens)
    assert reader.n_stored(asked[0], "local") == 300
    tiers[1].collector().remove_folder(folder("b"))
    machines.collect(tiers[0])
    assert not machines.world.places("marks")


def test_older_checkpoints_stay(machines: Machines) -> None:
    """A later record that names fewer does not replace the earlier one."""
    store, tier, states = machines.tier(has_states=True)
    _, reader, _ = machines.tier(has_states=True)
    assert states is not None
    ids = np.arange(3000, dtype=np.int32)
    for turns, (n, positions) in enumerate(
        [(300, (280, 300)), (2000, (1900, 2000)), (2500, (2400, 2500)), (3000, (2900, 3000))], 1
    ):
        store.insert(ids[:n], "local", [n])
        states.keep(ids[:n], "local", {at: (np.zeros(9, np.uint8), False) for at in positions})
        machines.push(tier, ids[:n], folder("a"), turns)
    asked = [ids[:n] for n in (350, 2100, 2600, 3000)]
    before = [reach(reader, each) for each in asked]
    machines.collect(tier)
    assert [reach(reader, each) for each in asked] == before
    for each in asked:
        found = reader.find(each, "local", 0)
        assert found is not None
        reader.fetch_path(found.put, each, "local")
    assert reader.n_stored(asked[0], "local") == 300


@pytest.mark.parametrize("n_damaged", [0, 1, 2])
def test_damaged_later_records_replace_none(machines: Machines, n_damaged: int) -> None:
    """Two whole ones have to contain what is deleted; the tenant's part is not the collector's to read."""
    store, tier, _ = machines.tier()
    for turns in (1, 2, 3):
        ids = np.arange(100 * turns, dtype=np.int32)
        write_all(store, store.insert(ids, "local", [len(ids)])[-1])
        machines.push(tier, ids, folder("a"), turns)
    records = sorted(machines.world.places("sessions"))
    for place in records[3 - n_damaged :]:
        data = bytes(machines.world.raw.get(place, 1 << 20))
        machines.world.raw.delete(place)
        machines.world.raw.put(place, data[:-1] + bytes([data[-1] ^ 1]))
    machines.collect(tier)
    left = sorted(machines.world.places("sessions"))
    assert left == (records[1:] if not n_damaged else records)
    if n_damaged == 2:
        assert tier.read_record("local", records[0]) == b"tower"


def test_an_unreadable_list_holds_back_nobody(machines: Machines) -> None:
    """For an hour it may be one whose deletes are on their way; then it is told of once and goes."""
    store, tier, _ = machines.tier()
    ids = np.arange(300, dtype=np.int32)
    write_all(store, store.insert(ids, "local", [300])[-1])
    machines.push(tier, ids, folder("a"))
    machines.world.now += 2 * HOUR_S
    tier.collector().remove_folder(folder("a"))
    tier.collector().run()
    phases = {each.split("/")[1]: each for each in machines.world.places("gc/condemned")}
    assert set(phases) == {"condemned"}
    for place in machines.world.places("gc/condemned"):
        machines.world.raw.delete(place)
        machines.world.raw.put(place, b"")
    for place in ("gc/condemned/notes.txt", "gc/condemned/" + "0" * 8 + "-" + "1" * 32):
        machines.world.put(place, b"of somebody else")
    with pytest.raises(BucketError, match=r"at gc/condemned/\w+-\w+ that cannot be read: it is"):
        machines.push(tier, ids, folder("b"))
    machines.world.now += HOUR_S
    machines.push(tier, ids, folder("b"))
    machines.collect(tier)
    kept = {"gc/condemned/notes.txt", "gc/condemned/" + "0" * 8 + "-" + "1" * 32}
    assert set(machines.world.places("gc")) == kept
    assert len(machines.world.live_records()) == 1
    assert reach(tier, ids) == 256


def test_a_list_without_a_key_is_passed_over(machines: Machines) -> None:
    """It may be another key's: it stays, and is named."""
    _, tier, _ = machines.tier()
    place = "gc/condemned/" + "1" * 32
    machines.world.put(place, b"")
    machines.world.now += 2 * HOUR_S
    assert machines.collect(tier, 2)[-1].passed_over == [place]
    assert machines.world.places("gc") == [place, place.replace("condemned", "known")]


def test_a_damaged_doomed_list_is_made_again(machines: Machines) -> None:
    store, tier, _ = machines.tier()
    ids = np.arange(300, dtype=np.int32)
    write_all(store, store.insert(ids, "local", [300])[-1])
    tier.put_path(ids, "local")
    machines.collect(tier, 1)
    (place,) = machines.world.places("gc/doomed")
    machines.world.raw.delete(place)
    machines.world.raw.put(place, b"")
    machines.collect(tier, 6)
    assert not machines.world.places("objects")
    assert not machines.world.places("gc")


def test_a_record_of_an_older_towerd_is_told(machines: Machines) -> None:
    """What it names cannot be told, so nothing goes: the message says which it is and what to do."""
    _, tier, _ = machines.tier()
    name = RecordName(1, "0" * 16, tier.model_name("local"), 0, "0" * 64)
    place = f"{folder('a')}/{name}"
    machines.world.put(place, tier.keys("local").seal(place, b"tower"))
    with pytest.raises(BucketError) as problem:
        machines.collect(tier, 1)
    said = problem.value.message
    assert said.startswith("The shared tier has 1 record that cannot be read with this key")
    assert f"{place} (an older towerd put it, and it does not say what it names)" in said
    assert "push its session or base again and delete it" in said


def test_one_run_condemns_all(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many lists as it takes."""
    monkeypatch.setattr(collector_module, "LIST_MAX", 3)
    store, tier, _ = machines.tier()
    ids = np.arange(2500, dtype=np.int32)
    write_all(store, store.insert(ids, "local", [2500])[-1])
    tier.put_path(ids, "local")
    (done,) = machines.collect(tier, 1)
    assert done.waiting_objects == 11
    assert len(machines.world.places("gc/doomed")) == 4
    assert machines.collect(tier, 1)[0].objects == 11


def test_marks_lead_to_rows(machines: Machines) -> None:
    """Of a record whose rows are gone, as a daemon of before or a rule of the bucket may leave it, no marks are put
    that would take the place of others."""
    beginning = np.arange(100, 800, dtype=np.int32)
    gone, later = (np.append(beginning, np.arange(500, dtype=np.int32) + n) for n in (1000, 5000))
    (store, tier, _), (other, another, _), (_, reader, _) = (machines.tier() for _ in range(3))
    write_all(store, store.insert(gone, "local", [len(gone)])[-1])
    machines.push(tier, gone, folder("a"))
    for place in [*machines.world.places("objects"), *machines.world.places("marks")]:
        machines.world.delete(place)
    machines.collect(tier, 1)
    write_all(other, other.insert(later, "local", [len(later)])[-1])
    machines.push(another, later, folder("b"))
    machines.collect(another, 4)
    found = reader.find(later[:700], "local", 0)
    assert found is not None
    reader.fetch_path(found.put, later[:700], "local", n_common=found.n_tokens)
    assert reader.n_stored(later[:700], "local") == 700


def test_another_keys_list_holds_back_nobody_in_any_phase(machines: Machines) -> None:
    _, tier, _ = machines.tier()
    for phase in ("condemned", "known", "doomed"):
        machines.world.put(f"gc/{phase}/" + "1" * 32, b"")
    machines.world.now += 2 * HOUR_S
    assert machines.collect(tier, 2)[-1].passed_over == ["gc/condemned/" + "1" * 32]
