"""What leaves the disk for want of space goes to the bucket first, and what is there leaves first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from store_tools import ROW_IDENTITY, check_rows, turn_of, write_all

from towerd.errors import SessionFrozen
from towerd.store import SegmentFile, Store
from towerd.store.tree.scope import public_of
from towerd.tiers.manager import Tiers
from towerd.tiers.shared.bucket import BucketError, open_bucket
from towerd.tiers.shared.leaving import PASSED_S, Leaving
from towerd.tiers.shared.measured_speed import MEASURED_BYTES_MIN, MeasuredSpeed
from towerd.tiers.shared.objects import PutRows
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids

N = 300
CHATS = [np.array([k, *range(100, 99 + N)], np.int32) for k in range(6)]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[Store]]:
    with (
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
        Store.open(tmp_path / "two", ROW_IDENTITY) as two,
    ):
        yield [one, two]
        for store in (one, two):
            store.check_integrity(keys=True)


def tier_of(store: Store, tmp_path: Path) -> SharedTier:
    bucket = open_bucket(f"file://{tmp_path}/bucket")
    return SharedTier(store, bucket, bytes(32), "near", has_rows=True)


def tiers_of(store: Store) -> Tiers:
    return Tiers(
        store,
        ROW_IDENTITY.layout,
        v_trans=False,
        hot_bytes=1 << 30,
        warm_bytes=1 << 30,
        policy="lru",
        shrink_after_s=-1.0,
    )


def stored(store: Store, ids: Ids, session: str = "") -> SegmentFile:
    """The file with the rows of a chat; session: of which they are a turn."""
    if session:
        store.commit_turn(turn_of(ids.tolist(), [7], session=session))
    else:
        store.insert(ids, "local", [len(ids)])
    node = store.match(ids, "local").nodes[-1]
    write_all(store, node)
    file = node.file
    assert file is not None
    return file


def keep(session: str, scope: str, put: PutRows) -> None:
    """The record that names what was put."""
    assert session.startswith("chat")
    assert scope == "local"
    assert put.rows


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def in_order(store: Store, nbytes: int) -> list[SegmentFile]:
    """The oldest files, `nbytes` of them."""
    found: list[SegmentFile] = []
    for file in sorted(store.files(), key=lambda file: file.id):
        if sum(each.nbytes for each in found) < nbytes:
            found.append(file)
    return found


def test_what_leaves_is_put(stores: list[Store], tmp_path: Path) -> None:
    """The files that would be evicted first, one after the other, and no others; those that nothing names stay out."""
    one, two = stores
    files = [stored(one, ids, f"chat-{k}" if k != 1 else "") for k, ids in enumerate(CHATS)]
    tier, asked = tier_of(one, tmp_path), []

    def is_worth(n_tokens: int, n_bytes: int) -> bool:
        asked.append((n_tokens, n_bytes))
        return len(asked) != 2

    leaving = Leaving(one, tier, lambda nbytes: in_order(one, nbytes), is_worth, keep)
    assert not leaving.put_next(one.state.warm_bytes)
    most = one.state.warm_bytes - sum(file.nbytes for file in files[:4])
    assert leaving.put_next(most)
    assert leaving.put_next(most)
    assert not leaving.put_next(most)
    assert asked == [(N, files[0].nbytes), (N, files[2].nbytes), (N, files[3].nbytes)]
    assert [file.in_bucket for file in files] == [True, False, False, True, False, False]
    assert tier.counters.saved == 2
    other = tier_of(two, tmp_path)
    for k, ids in enumerate(CHATS):
        put = tier.put_path(ids[:N], "local") if k in (0, 3) else None
        if put is not None:
            other.fetch_path(put, ids, "local")
            assert check_rows(two, two.match(ids, "local").nodes[-1]) == N
    assert all(file.in_bucket for file in two.files())


def test_a_bucket_that_fails(
    stores: list[Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be put is put once it is back."""
    one, _ = stores
    files = [stored(one, ids, f"chat-{k}") for k, ids in enumerate(CHATS)]
    tier = tier_of(one, tmp_path)
    leaving = Leaving(one, tier, lambda nbytes: in_order(one, nbytes), lambda *_: True, keep)

    def fail(place: str, data: bytes) -> bool:
        raise BucketError("it is full")

    with monkeypatch.context() as patch:
        patch.setattr(tier.bucket, "put", fail)
        with pytest.raises(BucketError):
            leaving.put_next(0)
    assert not files[0].in_bucket
    while leaving.put_next(0):
        pass
    assert all(file.in_bucket for file in files)
    assert tier.counters.saved == len(files)


def test_what_the_bucket_has_leaves_first(stores: list[Store]) -> None:
    """Of the files that are worth least; what is worth more stays although the bucket has it, too."""
    one, _ = stores
    tiers = tiers_of(one)
    chats = [np.array([k, *range(100, 110)], np.int32) for k in range(32)]
    files = [stored(one, ids, f"chat-{k}") for k, ids in enumerate(chats)]
    for k in (2, 9):
        files[k].in_bucket_until = time.monotonic() + 1000
    files[1].in_bucket_until = time.monotonic() - 1  # it may have gone since
    for _ in range(2):
        tiers.warm_bytes_max = one.state.warm_bytes - 1
        tiers.flush()
    assert [k for k, file in enumerate(files) if file.dropped] == [0, 2]
    tiers.close()


def test_shared_beginnings_are_put_with_what_leaves(stores: list[Store], tmp_path: Path) -> None:
    """A file is of no use without those before it: they are put, too, and nothing behind it is."""
    one, two = stores
    ids = np.arange(100, 400, dtype=np.int32)
    for n in (100, 200, 300):
        stored(one, ids[:n], "chat")
    middle = sorted(one.files(), key=lambda file: file.p0)[1]
    tier = tier_of(one, tmp_path)
    leaving = Leaving(one, tier, lambda _: [middle], lambda *_: True, keep)
    assert leaving.put_next(0)
    assert middle.in_bucket
    rows = tier.put_path(ids[: middle.p0 + middle.n_rows], "local")
    assert tier.counters.saved == 1
    other = tier_of(two, tmp_path)
    other.fetch_path(rows, ids, "local")
    assert other.n_stored(ids, "local") == middle.p0 + middle.n_rows


def test_rows_that_no_record_names_are_not_kept(stores: list[Store], tmp_path: Path) -> None:
    """They are garbage: the disk keeps its own, and they are tried again later."""
    one, _ = stores
    file, clock, tier = stored(one, CHATS[0], "chat"), Clock(), tier_of(one, tmp_path)
    problems = [SessionFrozen("it is frozen")]

    def keep_later(*_: object) -> None:
        assert not file.in_bucket
        if problems:
            raise problems.pop()

    leaving = Leaving(one, tier, lambda _: [file], lambda *_: True, keep_later, clock)
    with pytest.raises(SessionFrozen):
        leaving.put_next(0)
    assert not file.in_bucket
    assert not leaving.put_next(0)
    clock.now += PASSED_S
    assert leaving.put_next(0)
    assert file.in_bucket


def test_what_others_may_have_deleted_is_put_again(stores: list[Store], tmp_path: Path) -> None:
    """What the bucket has is not taken for granted for ever, and counts only if it was sent."""
    one, _ = stores
    file, clock, tier = stored(one, CHATS[0], "chat"), Clock(), tier_of(one, tmp_path)
    leaving = Leaving(one, tier, lambda _: [file], lambda *_: True, keep, clock)

    def put_once_more() -> None:
        file.in_bucket_until = time.monotonic()
        clock.now += PASSED_S
        assert leaving.put_next(0)
        assert file.in_bucket

    assert leaving.put_next(0)
    assert not leaving.put_next(0)
    put_once_more()
    assert tier.counters.saved == 1
    for each in tier.bucket.listing("objects"):
        tier.bucket.delete(each.place)
    put_once_more()
    assert tier.counters.saved == 2


def test_what_was_not_worth_it_may_be_later(stores: list[Store], tmp_path: Path) -> None:
    one, _ = stores
    file, clock, speeds = stored(one, CHATS[0], "chat"), Clock(), [True, False]
    tier = tier_of(one, tmp_path)
    leaving = Leaving(one, tier, lambda _: [file], lambda *_: speeds.pop(), keep, clock)
    assert not leaving.put_next(0)
    assert not leaving.put_next(0)
    clock.now += PASSED_S
    assert leaving.put_next(0)
    assert file.in_bucket


def test_short_moves_measure_nothing() -> None:
    """They take as long as their requests do."""
    speed = MeasuredSpeed()
    began = time.monotonic() - 1
    speed.moved(MEASURED_BYTES_MIN - 1, began)
    assert speed.bytes_per_s() == 0
    speed.moved(MEASURED_BYTES_MIN, began)
    measured = speed.bytes_per_s()
    assert measured > 0
    speed.moved(1, began)
    assert speed.bytes_per_s() == measured


def test_one_record_for_all_that_leaves_of_a_session(stores: list[Store], tmp_path: Path) -> None:
    """Whatever branch it is on, with others between; chats that no prompt would find are left out."""
    one, _ = stores
    files = [stored(one, ids, session) for ids, session in zip(CHATS, "ababab", strict=True)]
    short = stored(one, CHATS[0][:200] + 1000, "short")
    tier, kept = tier_of(one, tmp_path), []

    def keep_all(session: str, scope: str, put: PutRows) -> None:
        kept.append((session, scope, len(put.rows)))

    leaving = Leaving(one, tier, lambda n: in_order(one, n), lambda *_: True, keep_all)
    while leaving.put_next(0):
        pass
    assert kept == [("a", "local", 3), ("b", "local", 3)]
    assert all(file.in_bucket for file in files)
    assert not short.in_bucket
    assert tier.counters.saved == 6


def test_a_chat_behind_everybodys_rows(stores: list[Store], tmp_path: Path) -> None:
    """The record is its tenant's."""
    one, _ = stores
    ids = CHATS[0]
    base = one.insert(ids[:280], public_of("local"), [280])[-1]
    write_all(one, base)
    one.commit_turn(turn_of(ids.tolist(), [7], session="chat"))
    tier = tier_of(one, tmp_path)
    leaving = Leaving(one, tier, lambda n: in_order(one, n), lambda *_: True, keep)
    assert leaving.put_next(0)
    assert base.file is not None
    assert base.file.in_bucket


def test_a_file_that_is_evicted_while_it_is_put(
    stores: list[Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are saved, and its disk counts as taken until then."""
    one, two = stores
    file, tier = stored(one, CHATS[0], "chat"), tier_of(one, tmp_path)
    is_putting, may_put, put = threading.Event(), threading.Event(), tier.bucket.put
    puts: list[PutRows] = []

    def slow_put(place: str, data: bytes) -> bool:
        if place.startswith("objects/"):
            is_putting.set()
            assert may_put.wait(60)
        return put(place, data)

    def keep_put(session: str, scope: str, put: PutRows) -> None:
        puts.append(put)

    monkeypatch.setattr(tier.bucket, "put", slow_put)
    leaving = Leaving(one, tier, lambda _: [file], lambda *_: True, keep_put)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(leaving.put_next, 0)
        try:
            assert is_putting.wait(60)
            assert one.rows.drop_file(file) == file.nbytes
            assert one.state.dropped_bytes == file.nbytes
        finally:
            may_put.set()
        assert done.result(60)
    assert one.state.dropped_bytes == 0
    tier_of(two, tmp_path).fetch_path(puts[0], CHATS[0], "local")
    assert check_rows(two, two.match(CHATS[0], "local").nodes[-1]) == N
