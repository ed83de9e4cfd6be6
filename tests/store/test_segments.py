"""Rows on disk and in memory: writing, viewing, splitting, dropping."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from store_tools import (
    LAYOUT,
    MROPE,
    OTHER_MODEL,
    ROW_IDENTITY,
    assert_same_rows,
    check_rows,
    ids_of,
    make_hot,
    rows_of,
    write_all,
)

from towerd.errors import StoreError
from towerd.slots.errors import StateError
from towerd.slots.rows import KVRows
from towerd.store import Store
from towerd.store.rows.collect import drop_foreign

IDS = np.arange(100, 150, dtype=np.int32)


def test_rows_survive_writing_and_reopening(root: Path) -> None:
    """Several nodes share a file; every row comes back."""
    with Store.open(root, ROW_IDENTITY) as store:
        path = store.insert(IDS, "local", [10, 30, 50])
        make_hot(store, path[-1])
        assert store.state.hot_bytes == 50 * LAYOUT.token_bytes
        file = store.rows.write(path)
        assert all(node.file is file for node in path)
        assert store.state.warm_bytes == file.path.stat().st_size
        assert {part.tier for part in store.plan_rows(path[-1], 0, 99)} == {"hot"}
        for node in path:
            store.rows.drop_hot(node)
        assert store.state.hot_bytes == 0
        assert check_rows(store, path[-1]) == 50
        store.check_integrity(keys=True)
    with Store.open(root, ROW_IDENTITY) as store:
        match = store.match(IDS, "local")
        assert [part.tier for part in store.plan_rows(match, 0, 99)] == ["warm"] * 3
        assert check_rows(store, match.nodes[-1]) == 50
        assert store.verify().ok


def test_rows_are_views_of_the_mapped_file(store: Store) -> None:
    """Loading copies nothing, and the rows outlive the file and the store."""
    path = store.insert(IDS, "local", [50])
    write_all(store, path[-1])
    (rows,) = store.rows.load(store.plan_rows(path[-1], 5, 40)[0])
    assert all(not plane.flags.owndata and not plane.flags.writeable for plane in rows.planes())
    assert path[0].file is not None
    store.rows.drop_file(path[0].file)
    store.close()
    assert_same_rows(rows, rows_of(IDS[:40], 5))


def test_split_views_one_file(store: Store) -> None:
    """A split of a node with a file and hot rows rewrites nothing."""
    (leaf,) = store.insert(IDS, "local", [50])
    make_hot(store, leaf)
    file = store.rows.write([leaf])
    names = store.state.directory.names()
    store.insert(np.concatenate([IDS[:20], ids_of(1, 2)]), "local", [22])
    upper = leaf.parent
    assert upper is not None
    assert upper.file is file
    assert (upper.file_row0, leaf.file_row0) == (0, 20)
    assert upper.hot is not None
    assert leaf.hot is not None
    assert np.shares_memory(upper.hot.parts[0].k[0], rows_base(leaf.hot.parts[0]))
    store.check_integrity(keys=True)
    store.rows.drop_hot(leaf)
    assert [part.tier for part in store.plan_rows(leaf, 0, 50)] == ["hot", "warm"]
    assert check_rows(store, leaf) == 50
    assert store.state.directory.names() == names


def rows_base(rows: KVRows) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The buffer that a slice's first K plane was cut from."""
    base = rows.k[0].base
    assert isinstance(base, np.ndarray)
    return base


def test_plan_stops_at_the_first_gap(store: Store) -> None:
    """Rows behind a gap are of no use."""
    path = store.insert(IDS, "local", [10, 20, 30, 40])
    store.rows.attach_hot(path, rows_of(IDS[:20]))
    store.rows.attach_hot(path, rows_of(IDS[:40], 30))
    spans = [(part.p0, part.p1) for part in store.plan_rows(path[-1], 0, 99)]
    assert spans == [(0, 10), (10, 20)]
    assert [(p.p0, p.p1) for p in store.plan_rows(path[-1], 15, 18)] == [(15, 18)]
    assert store.plan_rows(path[-1], 20, 99) == []
    assert [(p.p0, p.p1) for p in store.plan_rows(path[-1], 30, 35)] == [(30, 35)]


def test_attach_takes_whole_nodes_only(store: Store) -> None:
    """Rows that cover a node in part leave it alone; hot nodes keep what they have."""
    path = store.insert(IDS, "local", [10, 20])
    assert store.rows.attach_hot(path, rows_of(IDS[:15])) == path[:1]
    assert store.rows.attach_hot(path, rows_of(IDS[:20])) == path[1:]
    with pytest.raises(StateError, match="layout"):
        store.rows.attach_hot(path, rows_of(IDS[:20], layout=MROPE.layout))


def test_attach_and_write_follow_a_split_meanwhile(store: Store) -> None:
    """Someone who took the nodes before a split still serves the parts above it."""
    (leaf,) = path = store.insert(IDS, "local", [50])
    store.insert(IDS, "local", [20])
    assert len(store.rows.attach_hot(path, rows_of(IDS))) == 2
    check_rows(store, leaf)


def test_write_adopts_the_parts_of_a_split_during_io(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free while the file is written, so the tree may change under it."""
    (leaf,) = path = store.insert(IDS, "local", [50])
    make_hot(store, leaf)
    real = os.rename

    def rename(*args: object) -> None:
        store.insert(IDS, "local", [20])
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    file = store.rows.write(path)
    assert [(n.p0, n.file) for n in leaf.path()] == [(0, file), (20, file)]
    store.check_integrity(keys=True)


def test_write_for_removed_nodes_leaves_no_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc between snapshot and adoption wins; the file goes."""
    (leaf,) = store.insert(IDS, "local", [50])
    make_hot(store, leaf)
    real = os.rename

    def rename(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        assert store.gc().segments == 1

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StoreError, match="removed"):
        store.rows.write([leaf])
    assert store.state.directory.names() == set()
    store.check_integrity()


def test_write_refuses_what_cannot_share_a_file(store: Store) -> None:
    """Cold nodes, gaps in the path, two scopes, no nodes."""
    public, own = store.insert(IDS[:10], "public", [10])[0], store.insert(IDS, "a", [30, 50])
    assert own[0] is public
    with pytest.raises(StoreError, match="no rows"):
        store.rows.write(own)
    make_hot(store, own[-1])
    for nodes, message in (
        ([], "no segments"),
        (own, "one scope"),
        ([own[0], own[2]], "consecutive"),
    ):
        with pytest.raises(StoreError, match=message):
            store.rows.write(nodes)
    assert store.rows.write(own[1:]) is store.rows.write(own[1:])


def test_cell_extension_rows(root: Path) -> None:
    """M-RoPE layouts carry 12 more bytes per token."""
    with Store.open(root, MROPE) as store:
        path = store.insert(IDS, "local", [25, 50])
        write_all(store, path[-1])
        assert check_rows(store, path[-1]) == 50
        assert store.verify().ok


def test_rows_with_strides_are_written(store: Store) -> None:
    """Rows need not be adjacent in memory."""
    rows = rows_of(IDS)
    apart = KVRows(
        LAYOUT,
        rows.positions,
        tuple(np.repeat(plane, 2, axis=0)[::2] for plane in rows.k),
        tuple(np.repeat(plane, 2, axis=0)[::2] for plane in rows.v),
    )
    path = store.insert(IDS, "local", [50])
    store.rows.attach_hot(path, apart)
    store.rows.write(path)
    store.rows.drop_hot(path[0])
    assert check_rows(store, path[0]) == 50


def test_modes_are_private(root: Path, store: Store) -> None:
    """Conversation content is for its owner only."""
    write_all(store, store.insert(IDS, "local", [50])[-1])
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_mappings_last_as_long_as_their_rows(root: Path) -> None:
    """Each costs a descriptor, and what was read through it counts as memory of the process."""
    with Store.open(root, ROW_IDENTITY) as store:
        leaves = [store.insert(ids_of(n, 1, 2), "local", [3])[-1] for n in range(20)]
        for leaf in leaves:
            write_all(store, leaf)
        (held,) = store.rows.load(store.plan_rows(leaves[0], 0, 3)[0])
        before = len(os.listdir("/dev/fd"))
        for leaf in leaves * 2:
            check_rows(store, leaf)
        assert len(os.listdir("/dev/fd")) == before
        assert_same_rows(held, rows_of([0, 1, 2]))


def test_drop_foreign_frees_other_models_files(root: Path) -> None:
    """A disk budget must be able to reach what an earlier model left behind."""
    with Store.open(root, OTHER_MODEL) as store:
        write_all(store, store.insert(IDS, "local", [50])[-1])
        size = store.state.warm_bytes
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.state.warm_bytes == 0
        assert store.stats()["disk_bytes"] == size
        (leaf,) = store.insert(IDS, "local", [50])
        write_all(store, leaf)
        store.pins.add(leaf.id)
        assert store.gc().files == 0
        assert drop_foreign(store.state, 1) == size
        assert drop_foreign(store.state, 1) == 0
        store.check_integrity()
    with Store.open(root, OTHER_MODEL) as store:
        assert store.match(IDS, "local").n == 50
        assert store.plan_rows(store.match(IDS, "local"), 0, 50) == []
        store.check_integrity(keys=True)


def test_bytes_of_counts_native_rows(store: Store) -> None:
    """The unit of every budget."""
    (leaf,) = store.insert(IDS, "local", [50])
    make_hot(store, leaf)
    assert leaf.hot is not None
    assert store.bytes_of(leaf) == leaf.hot.nbytes == store.state.hot_bytes
