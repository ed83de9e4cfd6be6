"""What is collected from a bucket, and that nobody loses a race against it."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from shared_world import Body, World, WorldBucket
from store_tools import ROW_IDENTITY, write_all

from towerd.slots.errors import StateError
from towerd.store import Store
from towerd.tiers.shared import objects
from towerd.tiers.shared import tier as tier_module
from towerd.tiers.shared.bucket import Bucket, BucketError, ObjectMissing
from towerd.tiers.shared.deleting import collector as collector_module
from towerd.tiers.shared.deleting import survey as survey_module
from towerd.tiers.shared.deleting.collector import Collector
from towerd.tiers.shared.deleting.leases import Hold, Leases
from towerd.tiers.shared.naming import naming, read_naming
from towerd.tiers.shared.objects import (
    VERSION,
    PartsAhead,
    SessionRecord,
    decode_record,
    encode,
    read_rows,
)
from towerd.tiers.shared.records import RecordName, best_first
from towerd.tiers.shared.sealing import TenantKeys
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, ids_bytes

MASTER = bytes(range(32))
COLLECTOR = TenantKeys.of_collector(MASTER)
BASE = np.arange(100, 130, dtype=np.int32)
CHATS = [np.concatenate([BASE, np.arange(30, dtype=np.int32) + 1000 * n]) for n in (1, 2, 3, 4)]
HOUR_S = 3600.0
ENDS = [40, 50, 60]
"""Tokens of a chat after each of its turns."""
Clock = Callable[[], float]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Store]]:
    """Two machines that have both chats, in files that are cut at other places."""
    folder = tmp_path_factory.mktemp("stores")
    with (
        Store.open(folder / "one", ROW_IDENTITY) as one,
        Store.open(folder / "two", ROW_IDENTITY) as two,
    ):
        for store, cut in ((one, 30), (two, 40)):
            for chat in CHATS:
                for end in (cut, 50, 60):
                    write_all(store, store.insert(chat[:end], "local", [end])[-1])
        yield [one, two]


def tier_of(store: Store, bucket: Bucket, clock: Clock) -> SharedTier:
    return SharedTier(store, bucket, MASTER, "near", has_rows=True, clock=clock)


def folder_of(chat: int) -> str:
    return f"sessions/{TenantKeys.of(MASTER, 'local').name('session', bytes([chat]))}"


def push(tier: SharedTier, chat: int, turn: int) -> None:
    """As a daemon pushes a session after a turn."""
    ids: Ids = CHATS[chat][: ENDS[turn]]
    with tier.held():
        put = tier.put_path(ids, "local")
        record = SessionRecord(
            version=VERSION,
            row_identity=ROW_IDENTITY.digest(),
            adapters="",
            rows=put.rows,
            transform_bases=[],
            tower=bytes([chat, turn]),
        )
        data = encode(record)
        text = hashlib.sha256(ids_bytes(ids)).hexdigest()[:16]
        content = tier.keys("local").name("record", data)
        name = RecordName(turn + 1, text, tier.model_name("local"), put.n_tokens, content)
        turns = [bytes([chat, n]) for n in range(turn + 1)]
        named = naming(put.objects, turns, turns, way=tier.way(ids, "local", put))
        tier.put_record("local", folder_of(chat), name, data, named)


@dataclass
class Known:
    """What is known of a world beside it."""

    pushed: dict[int, int] = field(default_factory=dict)
    """The furthest turn of each chat that was put since it was removed."""
    removed: dict[int, float] = field(default_factory=dict)
    """When the last removal of each chat ended; infinite while one runs."""
    last_read: int = 0
    last_removed: int = 0
    n_pushed: int = 0
    n_read: int = 0


def writer(world: World, known: Known, store: Store) -> Body:
    def body(bucket: WorldBucket, clock: Clock) -> None:
        tier = tier_of(store, bucket, clock)
        while not world.is_calm:
            bucket.sleep(HOUR_S / 4)
            some, turn = world.rng.randrange(len(CHATS)), world.rng.randrange(len(ENDS))
            chat = world.rng.choice((some, known.last_removed))
            began = world.n_steps
            try:
                push(tier, chat, turn)
            except BucketError:
                continue
            known.n_pushed += 1
            if began > known.removed.get(chat, -1):
                known.pushed[chat] = max(turn, known.pushed.get(chat, 0))

    return body


def remover(world: World, known: Known, store: Store) -> Body:
    def body(bucket: WorldBucket, clock: Clock) -> None:
        collector = tier_of(store, bucket, clock).collector()
        while not world.is_calm:
            bucket.sleep(HOUR_S / 2)
            chat = world.rng.choice((world.rng.randrange(len(CHATS)), known.last_read))
            known.removed[chat] = float("inf")
            while True:
                known.pushed.pop(chat, None)
                try:
                    collector.remove_folder(folder_of(chat))
                    break
                except BucketError:
                    continue
            known.pushed.pop(chat, None)
            known.removed[chat] = world.n_steps
            known.last_removed = chat

    return body


def gc(world: World, store: Store) -> Body:
    def body(bucket: WorldBucket, clock: Clock) -> None:
        collector = tier_of(store, bucket, clock).collector()
        while not world.is_calm:
            bucket.sleep(world.rng.choice((0.0, HOUR_S / 4)))
            with suppress(BucketError):
                collector.run()

    return body


def reader(world: World, known: Known, store: Store) -> Body:
    """Takes the best record that is there, and all of its rows."""

    def read(tier: SharedTier, bucket: WorldBucket) -> None:
        keys = tier.keys("local")
        known.last_read = world.rng.randrange(len(CHATS))
        folder = folder_of(known.last_read)
        with tier.held() as hold:
            listed = best_first(bucket.listing(folder), tier.model_name("local"))
            if not listed:
                return
            try:
                record = decode_record(tier.read_record("local", listed[0].place), SessionRecord)
            except ObjectMissing:
                return  # it was removed, or another one contains it
            is_sure = bucket.read_live
            for place in record.rows:
                bucket.sleep(world.rng.choice((0.0, 600.0, HOUR_S)))
                hold.reading()
                try:
                    found = read_rows(keys, place.name, PartsAhead(bucket).of(keys, place.name))
                    data = b"".join(found.data)
                except (ObjectMissing, StateError) as error:
                    if is_sure:
                        world.problems.append(f"a reader lost {place.name}: {error}")
                    return
                digest = hashlib.blake2b(data, digest_size=32).digest()
                ids = CHATS[record.tower[0]][place.p0 : place.p1]
                if digest != found.header.digest or found.header.ids != ids_bytes(ids):
                    world.problems.append(f"wrong bytes in {place.name}")
            known.n_read += 1

    def body(bucket: WorldBucket, clock: Clock) -> None:
        tier = tier_of(store, bucket, clock)
        while not world.is_calm:
            read(tier, bucket)
            bucket.sleep(HOUR_S / 2)

    return body


def check_live(world: World) -> None:
    """Every object that a record names is whole."""
    for place, names in world.live_records().items():
        for name in names:
            for part in range(world.n_parts.get(name, 1)):
                if f"objects/{name}/{part:04d}" not in world.modified:
                    world.problems.append(f"{place} has lost part {part} of {name}")


def played(seed: int, stores: list[Store], n_steps: int = 2500) -> tuple[World, Known]:
    """A world after so many requests of four writers, two that collect, a reader, and one who removes chats."""
    world, known, ids = World(seed, COLLECTOR), Known(), random.Random(seed)
    with patch.object(secrets, "token_hex", lambda n: ids.randbytes(n).hex()):
        for store in (*stores, *stores):
            world.start(writer(world, known, store))
        for store in stores:
            world.start(gc(world, store))
        world.start(reader(world, known, stores[0]), is_faulty=False)
        world.start(remover(world, known, stores[1]))
        world.run(n_steps, lambda: check_live(world))
    return world, known


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of several parts; requests of one daemon one after the other."""
    monkeypatch.setattr(objects, "PART_BYTES", 1 << 13)
    monkeypatch.setattr(survey_module, "READS_AT_ONCE", 1)
    one = partial(ThreadPoolExecutor, 1)
    monkeypatch.setattr(tier_module, "ThreadPoolExecutor", lambda _, name: one(name))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(6))
def test_nobody_loses_a_race(stores: list[Store], seed: int) -> None:
    """No record that lives lacks a row; no reader of one does; what was put stays; garbage goes."""
    world, known = played(seed, stores)
    assert world.problems == []
    assert known.n_pushed > 5
    assert known.n_read > 3
    collector = tier_of(stores[0], WorldBucket(world), lambda: world.now).collector()
    for _ in range(12):
        world.now += 4000.0
        collector.run()
        check_live(world)
    assert world.problems == []
    live = world.live_records()
    named = {name for names in live.values() for name in names}
    assert {place.split("/")[1] for place in world.places("objects")} == named
    assert not world.places("gc")
    assert not world.places("leases")
    assert set(world.places("sessions")) == set(live)
    passed = {
        mark.place
        for place in live
        if (way := read_naming(world.raw, COLLECTOR, place).way) is not None
        for mark in way.marks
    }
    assert passed <= set(world.places("marks"))
    for chat, turn in known.pushed.items():
        found = [each for each in live if each.startswith(folder_of(chat))]
        assert max(int(each.split("/")[2][:6]) for each in found) >= turn + 1


@pytest.mark.usefixtures("small")
def test_a_fault_is_found(stores: list[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that trust what is there, whatever is being deleted."""

    def is_condemned(hold: Hold, place: str) -> bool:
        hold.writing()
        return False

    monkeypatch.setattr(Hold, "is_condemned", is_condemned)
    assert any(played(seed, stores)[0].problems for seed in range(20))  # about a fifth do


def quiet_world(stores: list[Store]) -> tuple[World, SharedTier, Collector]:
    """A world in which nothing runs by itself, with a chat that was put two hours ago."""
    world = World(0, COLLECTOR)
    bucket = WorldBucket(world)
    tier = tier_of(stores[0], bucket, lambda: world.now)
    collector = tier_of(stores[1], bucket, lambda: world.now).collector()
    push(tier, 0, 2)
    world.now += 2 * HOUR_S
    return world, tier, collector


def lost(world: World) -> bool:
    """Whether a record that lives lacks rows."""
    check_live(world)
    return bool(world.problems)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fault", ["", "no leases"])
def test_a_push_beside_a_collection(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Rows that were garbage are found to be there; before the record is put that names them, they are condemned."""
    world, tier, collector = quiet_world(stores)
    collector.remove_folder(folder_of(0))
    if fault == "no leases":
        monkeypatch.setattr(Leases, "hold_back", lambda *_: False)
    with tier.held():
        tier.put_path(CHATS[0], "local")
        collector.run()
        push(tier, 0, 2)
    for _ in range(4):
        world.now += 2 * HOUR_S
        collector.run()
    assert lost(world) == bool(fault)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("takes_s", [200.0, 4 * HOUR_S])
@pytest.mark.parametrize("fault", ["", "no grace, no leases"])
def test_a_slow_reader(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch, fault: str, takes_s: float
) -> None:
    """The chat is removed while it is read, and collected again and again."""
    world, tier, collector = quiet_world(stores)
    if fault:
        monkeypatch.setattr(collector_module, "GRACE_S", 0.0)
        monkeypatch.setattr(Leases, "hold_back", lambda *_: False)
    (place,) = world.live_records()
    n_read = 0
    with tier.held() as hold:
        record = decode_record(tier.read_record("local", place), SessionRecord)
        for step in range(20):
            hold.reading()
            if step == 1:
                collector.remove_folder(folder_of(0))
            collector.run()
            world.now += takes_s / 20
        for rows in record.rows:
            n_read += all(
                f"objects/{rows.name}/{part:04d}" in world.modified for part in range(rows.n_parts)
            )
    assert (n_read == len(record.rows)) == (not fault)
    for _ in range(3):
        world.now += 2 * HOUR_S
        collector.run()
    assert not world.places("objects")


@pytest.mark.usefixtures("small")
def test_what_is_being_deleted_is_put_under_another_name(stores: list[Store]) -> None:
    world, tier, collector = quiet_world(stores)
    old = set(world.places("objects"))
    collector.remove_folder(folder_of(0))
    collector.run()
    push(tier, 0, 2)
    new = set(world.places("objects")) - old
    assert {place.split("/")[1].partition("-")[0] for place in new} == {
        place.split("/")[1] for place in old
    }
    for _ in range(4):
        world.now += 2 * HOUR_S
        collector.run()
    assert not lost(world)
    assert set(world.places("objects")) == new
    for _ in range(2):
        world.now += 24 * HOUR_S
        push(tier, 0, 2)
    for _ in range(4):
        world.now += 2 * HOUR_S
        collector.run()
    assert not lost(world)
    assert len(world.live_records()) == 2  # the last, and one before it
    assert len(world.places("objects")) == len(old)


@pytest.mark.usefixtures("small")
def test_records_of_another_key(stores: list[Store]) -> None:
    """What they name cannot be told: nothing is deleted."""
    world, tier, collector = quiet_world(stores)
    other = SharedTier(
        stores[0], tier.bucket, bytes(32), "near", has_rows=True, clock=lambda: world.now
    )
    with pytest.raises(BucketError, match="1 record that cannot be read with this key"):
        other.collector().run()
    assert not world.places("gc")
    assert not lost(world)


@pytest.mark.usefixtures("small")
def test_a_writer_that_slept(stores: list[Store]) -> None:
    """Its lease may be over: it puts no record."""
    world, tier, _ = quiet_world(stores)
    with tier.held() as hold:
        tier.put_path(CHATS[1], "local")
        world.now += 700.0
        with pytest.raises(BucketError, match="left for 700 s while writing"):
            hold.put("sessions/x/y", b"")
    push(tier, 1, 2)
    assert not lost(world)


@pytest.mark.usefixtures("small")
def test_a_deleted_record_that_comes_back(stores: list[Store]) -> None:
    """The request that put it lands once more after it was deleted: it goes again."""
    world, _, collector = quiet_world(stores)
    (place,) = world.live_records()
    data = bytes(world.raw.get(place, 1 << 20))
    collector.remove_folder(folder_of(0))
    assert not world.live_records()
    world.put(place, data)
    for _ in range(8):
        world.now += 2 * HOUR_S
        collector.run()
        assert not lost(world)
    assert not world.places("sessions")
    assert not world.places("objects")
    assert not world.places("gc")
