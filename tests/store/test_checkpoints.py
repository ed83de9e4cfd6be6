"""State checkpoints: durable, checked, found again, and evicted first where they save least."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from store_tools import OTHER_MODEL, ROW_IDENTITY, turn_of

from towerd.errors import RowsDamaged
from towerd.store import Store
from towerd.store.rows.checkpoints import CheckpointTable, checkpoint_bytes
from towerd.tiers.checkpoint_tier import CheckpointTier, leaf_distance

IDS = np.arange(1, 101, dtype=np.int32)


def state(position: int, n: int = 1000) -> npt.NDArray[np.uint8]:
    """Bytes that depend on the position."""
    return np.random.default_rng(position).integers(0, 256, n).astype(np.uint8)


def stored(store: Store, *positions: int, derived: bool = False) -> CheckpointTable:
    """The tokens are recorded and these positions have states in files."""
    store.insert(IDS, "local", [len(IDS)])
    table = CheckpointTable(store.state)
    nodes = table.attach(IDS, "local", {p: (state(p), derived) for p in positions})
    assert [node.p1 for node in nodes] == list(positions)
    for node in nodes:
        assert table.write(node) > 1000
    return table


def test_states_survive_a_restart_and_later_splits(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        stored(store, 40, 70)
    with Store.open(root, ROW_IDENTITY) as store:
        table = CheckpointTable(store.state)
        store.insert(np.append(IDS[:55], 7).astype(np.int32), "local", [56])
        found = {each.position: each for each in table.all()}
        assert sorted(found) == [40, 70]
        for position, each in found.items():
            np.testing.assert_array_equal(table.load(each), state(position))
            assert checkpoint_bytes(store.state, each.node) == each.nbytes
        store.check_integrity()


def test_only_recorded_tokens_take_states(store: Store) -> None:
    store.insert(IDS[:50], "local", [50])
    table = CheckpointTable(store.state)
    nodes = table.attach(IDS, "local", {50: (state(50), False), 60: (state(60), False)})
    assert [node.p1 for node in nodes] == [50]
    assert table.attach(IDS, "elsewhere", {50: (state(50), False)}) == []


def test_an_exact_state_replaces_a_derived_one_never_the_reverse(store: Store) -> None:
    table = stored(store, 40, derived=True)
    (node,) = table.attach(IDS, "local", {40: (state(41), False)})
    table.write(node)
    assert table.attach(IDS, "local", {40: (state(42), True)}) == []
    found = table.at(node)
    assert found is not None
    np.testing.assert_array_equal(table.load(found), state(41))
    assert len(list(table.folder.iterdir())) == 1


@pytest.mark.parametrize("at", [2, 40, 4096, 5000, -1])
def test_every_damage_is_found(store: Store, at: int) -> None:
    """A flipped bit anywhere that counts: set aside, and never used."""
    table = stored(store, 40)
    (path,) = table.folder.iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    (found,) = table.all()
    with pytest.raises(RowsDamaged, match="set aside"):
        table.load(found)
    assert table.all() == []
    assert not list(table.folder.iterdir())
    assert len(list((store.state.directory.quarantine).iterdir())) == 1


def test_a_state_of_another_prefix_is_refused(store: Store) -> None:
    """Files cannot be swapped: each says whose state it holds."""
    table = stored(store, 40, 70)
    first, second = sorted(table.folder.iterdir())
    swapped = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(swapped)
    for found in table.all():
        with pytest.raises(RowsDamaged, match="another prefix"):
            table.load(found)


def test_a_file_that_a_kill_left_is_taken_over(root: Path) -> None:
    """Its segment is removed, the file is not yet: once the tokens are back it is written over,
    counts once, and only its owner deletes it."""
    with Store.open(root, ROW_IDENTITY) as store:
        table = stored(store, 40)
        (path,) = table.folder.iterdir()
        data = path.read_bytes()
        store.gc()
        assert not path.exists()
    path.write_bytes(data)
    with Store.open(root, ROW_IDENTITY) as store:
        table = stored(store, 40)
        assert table.file_bytes == len(data)
        assert table.drop_foreign(1) == 0
        (found,) = table.all()
        np.testing.assert_array_equal(table.load(found), state(40))


def test_a_derived_state_is_not_served_as_an_exact_one(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        (path,) = stored(store, 40, derived=True).folder.iterdir()
    path.rename(path.with_name(path.name.replace(".derived", "")))
    with Store.open(root, ROW_IDENTITY) as store:
        table = CheckpointTable(store.state)
        (found,) = table.all()
        with pytest.raises(RowsDamaged, match="exact"):
            table.load(found)


def test_what_a_kill_left_is_swept_and_foreign_states_go_first(root: Path) -> None:
    with Store.open(root, OTHER_MODEL) as store:
        stored(store, 40)
    (root / "boundaries" / "0123.tmp").write_bytes(b"half")
    os.utime(root / "boundaries" / "0123.tmp", (0, 0))
    with Store.open(root, ROW_IDENTITY) as store:
        table = stored(store, 70)
        assert not list(table.folder.glob("*.tmp"))
        assert len(list(table.folder.iterdir())) == 2
        assert table.drop_foreign(1) > 1000
        assert [each.position for each in table.all()] == [70]


def test_verify_reads_every_state_of_every_model(root: Path) -> None:
    with Store.open(root, OTHER_MODEL) as store:
        stored(store, 40)
    with Store.open(root, ROW_IDENTITY) as store:
        before = set((root / "boundaries").iterdir())
        table = stored(store, 20, 70)
        mine = {path.name for path in table.folder.iterdir() if path not in before}
        sizes = [path.stat().st_size for path in table.folder.iterdir()]
        seen: list[tuple[int, int]] = []
        report = store.verify(lambda done, total: seen.append((done, total)))
        assert (report.ok, report.boundaries, report.orphans) == (True, 3, 0)
        assert seen[-1] == (report.bytes_read, report.bytes_read) == (sum(sizes), sum(sizes))
        damaged, renamed, _ = sorted(table.folder.iterdir())
        with damaged.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"otherwise"[:8])
        renamed.rename(renamed.with_name("0" * 64 + ".twb"))
        report = store.verify()
        assert (report.ok, report.quarantined, report.orphans) == (False, 0, 1)
        assert len(report.problems) == 2
        assert store.verify(repair=True).quarantined == 2
        report = store.verify()
        assert (report.ok, report.boundaries, report.orphans) == (True, 1, 0)
        assert len(list(store.state.directory.quarantine.iterdir())) == 2
        for each in table.all():  # what was set aside under an open table is forgotten
            with contextlib.suppress(RowsDamaged):
                table.load(each)
        there = {path.name for path in table.folder.iterdir()}
        assert len(table.all()) == len([name for name in there if name in mine]) > 0


def test_gc_deletes_the_states_of_what_it_removes(store: Store) -> None:
    table = stored(store, 40, 70)
    other = IDS[::-1].copy()
    turn = store.commit_turn(turn_of(other[:50].tolist(), other[50:].tolist()))
    (node,) = table.attach(other, "local", {60: (state(1), False)})
    table.write(node)
    half = table.folder / "0123.tmp"
    half.write_bytes(b"being written")
    store.state.catalog.begin_file(half.name)
    would = store.gc(dry_run=True)
    assert len(list(table.folder.iterdir())) == 4
    done = store.gc()
    assert (done.files, done.bytes_freed) == (would.files, would.bytes_freed)
    assert done.files == 2
    store.state.catalog.end_file(half.name)
    assert store.gc().bytes_freed == len(b"being written")
    table.sweep()
    (found,) = table.all()
    assert found.position == 60
    assert table.file_bytes == found.nbytes
    store.delete_session(turn.session_id)
    store.gc()
    assert not list(table.folder.iterdir())


def test_the_budget_keeps_the_leaf_and_evicts_from_the_past(store: Store) -> None:
    ids = np.arange(1, 4097, dtype=np.int32)
    store.insert(ids, "local", [len(ids)])
    tier = CheckpointTier(store, bytes_max=8 * (1000 + 4096), exact=False)
    try:
        every = range(256, 4097, 256)
        tier.accept(ids, "local", {p: (state(p), False) for p in every})
        tier.flush()
        kept = sorted(each.position for each in tier.table.all())
        assert len(kept) == 8
        assert kept[-2:] == [3840, 4096]
        gaps = np.diff([0, *kept])
        assert gaps[0] >= gaps[-1]
        found = tier.deepest(store.hold(ids, "local"), 0, 4000)
        assert found is not None
        assert found.position == 3840
        assert tier.stats()["boundary_evictions"] == 8
    finally:
        tier.close()


def test_exact_daemons_take_nothing_derived(store: Store) -> None:
    stored(store, 40, derived=True)
    tier = CheckpointTier(store, bytes_max=1 << 20, exact=True)
    try:
        assert tier.deepest(store.hold(IDS, "local"), 0, 100) is None
        tier.accept(IDS, "local", {50: (state(50), True)})
        tier.flush()
        assert len(tier.table.all()) == 1
    finally:
        tier.close()


def test_distance_to_the_nearest_leaf(store: Store) -> None:
    store.insert(IDS, "local", [20, 100])
    store.insert(np.append(IDS[:20], [9, 9, 9]).astype(np.int32), "local", [23])
    top = store.state.tree.root.children
    (node,) = top
    assert leaf_distance(node) == 3
