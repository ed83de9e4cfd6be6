"""Re-encoding: its effect on rows, plans and writers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from format_oracle import STORED, plane_of, random_rows
from reencoded import IDS, one_leaf, reencode
from store_tools import (
    LAYOUT,
    MROPE,
    ROW_IDENTITY,
    check_rows,
    formats_of,
    ids_of,
    make_hot,
    turn_of,
    write_all,
)

from lab.reference.transcode import decode
from towerd.errors import RowsDamaged
from towerd.kernels.formats import BY_NAME
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import KVRows
from towerd.store import FormatRequest, Node, Store
from towerd.store.rows.format_request import differs
from towerd.store.segments.segment_header import FormatRun
from towerd.tokens import Provenance


@pytest.mark.parametrize("name", STORED)
def test_every_format_comes_back(root: Path, name: str) -> None:
    """What is loaded is the native rows encoded once, before and after a restart."""
    with Store.open(root, ROW_IDENTITY) as store:
        leaf, file = one_leaf(store)
        before = store.state.warm_bytes
        new = reencode(store, file, FormatRequest(4, 40, name))
        assert formats_of(store, leaf) == [(4, NATIVE), (36, name), (10, NATIVE)]
        assert not file.path.exists()
        assert store.state.warm_bytes == new.path.stat().st_size != before
        assert store.held(leaf).format == f"native+{name}"
        kept = LAYOUT.stored_as(name).token_bytes
        assert store.held(leaf).nbytes == 14 * LAYOUT.token_bytes + 36 * kept
        assert store.stats()["warm_quantized_bytes"] == 36 * kept
        assert check_rows(store, leaf) == 50
        store.check_integrity(keys=True)
    with Store.open(root, ROW_IDENTITY) as store:
        leaf = store.match(IDS, "local").nodes[-1]
        assert check_rows(store, leaf) == 50
        assert formats_of(store, leaf) == [(4, NATIVE), (36, name), (10, NATIVE)]
        report = store.verify()
        assert (report.ok, report.orphans) == (True, 0), report.problems


def test_several_segments_in_one_file(root: Path) -> None:
    """Each segment of a file has its own format; a later split views the same runs."""
    with Store.open(root, ROW_IDENTITY) as store:
        leaf, file = one_leaf(store, (10, 30, 50))
        new = reencode(
            store,
            file,
            FormatRequest(0, 10, "q4h"),
            FormatRequest(10, 30, "q6"),
            FormatRequest(30, 50, "q8"),
        )
        assert [node.file for node in leaf.path()] == [new] * 3
        assert [formats_of(store, node) for node in leaf.path()] == [
            [(10, "q4h")],
            [(20, "q6")],
            [(20, "q8")],
        ]
        store.insert(np.concatenate([IDS[:25], ids_of(1)]), "local", [20, 26])
        assert [node.p1 for node in leaf.path()] == [10, 20, 25, 30, 50]
        assert check_rows(store, leaf) == 50
        store.check_integrity(keys=True)
    with Store.open(root, ROW_IDENTITY) as store:
        assert check_rows(store, store.match(IDS, "local").nodes[-1]) == 50


def test_approximate_rows_are_encoded_again_where_it_is_asked_for(store: Store) -> None:
    """The values of the first encoding, in the second format; never in one that takes more."""
    leaf, file = one_leaf(store)
    new = reencode(store, file, FormatRequest(10, 30, "q8"), FormatRequest(30, 40, "q4"))
    first = [np.concatenate(each) for each in zip(*values(store, leaf), strict=True)]
    request = FormatRequest(0, 50, "q6", again=["q8"])
    assert differs(new, [request], LAYOUT) == (40, 10)
    reencode(store, new, request)
    assert formats_of(store, leaf) == [(30, "q6"), (10, "q4"), (10, "q6")]
    second = [np.concatenate(each) for each in zip(*values(store, leaf), strict=True)]
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a[30:40], b[30:40])
        if a.shape[1] % 32:  # no block fits: stays as computed
            assert np.array_equal(a, b)
            continue
        step = np.abs(a).reshape(len(a), -1, 32).max(axis=2) / 31
        error = np.abs(a - b).reshape(len(a), -1, 32).max(axis=2)
        assert (error <= 0.51 * step + 1e-3 * np.abs(a).max()).all()
        assert (error[10:30] > 0).any()


def values(store: Store, leaf: Node) -> list[list[npt.NDArray[np.float32]]]:
    """The decoded planes of each run of a segment's rows."""
    (part,) = store.plan_rows(leaf, leaf.p0, leaf.p1)
    return [
        [
            decode(BY_NAME[shape.format.name], plane)
            for plane, shape in zip(rows.planes(), rows.layout.planes, strict=True)
        ]
        for rows in store.rows.load(part)
    ]


def test_approximate_rows_are_never_encoded_again(store: Store) -> None:
    """In the requested format they are copied, in another one they stay."""
    leaf, file = one_leaf(store)
    new = reencode(store, file, FormatRequest(10, 20, "q8"), FormatRequest(20, 30, "q4"))
    request = FormatRequest(0, 50, "q4")
    assert differs(new, [request], LAYOUT) == (30, 10)
    newer = reencode(store, new, request)
    assert formats_of(store, leaf) == [(10, "q4"), (10, "q8"), (30, "q4")]
    assert differs(newer, [request], LAYOUT) == (0, 10)
    native = FormatRequest(0, 50, NATIVE)
    assert differs(newer, [native], LAYOUT) == (0, 50)
    reencode(store, newer, native)
    assert formats_of(store, leaf) == [(10, "q4"), (10, "q8"), (30, "q4")]
    assert check_rows(store, leaf) == 50


def test_formats_that_gain_nothing_are_native(root: Path) -> None:
    """Where no plane would shrink there is nothing to do, and nothing is called approximate."""
    small = KVLayout((plane_of("q4_0", 64),), (plane_of("f16", 16),))
    with Store.open(root, replace(ROW_IDENTITY, layout=small)) as store:
        (leaf,) = store.insert(IDS, "local", [50])
        store.rows.attach_hot([leaf], random_rows(small, 0, 50))
        file = store.rows.write([leaf])
        assert differs(file, [FormatRequest(0, 50, "q4")], small) == (0, 0)
        new = reencode(store, file, FormatRequest(0, 50, "q4"))
        assert formats_of(store, leaf)[0] == (50, NATIVE)
        assert new.is_native
        assert not store.plan_rows(leaf, 0, 50)[0].provenance.any()


def test_provenance_of_rows(store: Store) -> None:
    """Of files and of hot rows; an origin survives writing and re-encoding."""
    path = store.insert(IDS, "local", [20, 50])
    make_hot(store, path[0])
    store.rows.write(path[:1])
    rows = random_rows(LAYOUT, 20, 50)
    assert store.rows.attach_hot(path, rows, origin=Provenance.DERIVED) == [path[1]]
    hot = store.plan_rows(path[-1], 0, 50)[-1]
    assert (hot.tier, set(hot.provenance.tolist())) == ("hot", {Provenance.DERIVED})
    file = store.rows.write(path[1:])
    assert file.provenance(20, 50).tolist() == [Provenance.DERIVED] * 30
    reencode(store, file, FormatRequest(30, 50, "q8"))
    store.rows.drop_hot(path[1])
    (part,) = store.plan_rows(path[-1], 25, 35)
    assert part.provenance.tolist() == [Provenance.DERIVED] * 5 + [Provenance.APPROXIMATE] * 5
    assert store.rows.attach_hot(
        [path[1]], store.rows.load(store.plan_rows(path[1], 20, 50)[0]).copy()
    ) == [path[1]]
    (part,) = store.plan_rows(path[-1], 25, 35)
    assert (part.tier, part.provenance.tolist()) == (
        "hot",
        [Provenance.EXACT] * 5 + [Provenance.APPROXIMATE] * 5,
    )


def test_exact_plans_pass_over_the_rest(store: Store) -> None:
    """Approximate and derived rows count as none, and exact ones take their place."""
    path = store.insert(IDS, "local", [20, 50])
    make_hot(store, path[-1])
    file = store.rows.write(path)
    assert len(store.plan_rows(path[-1], 0, 50, worst=Provenance.EXACT)) == 2
    new = reencode(store, file, FormatRequest(30, 50, "q4h"))
    assert [p.tier for p in store.plan_rows(path[-1], 0, 50, worst=Provenance.EXACT)] == [
        "hot",
        "hot",
    ]
    for node in path:
        store.rows.drop_hot(node)
    assert [p.p1 for p in store.plan_rows(path[-1], 0, 50, worst=Provenance.EXACT)] == [20]
    assert [p.p1 for p in store.plan_rows(path[-1], 0, 50)] == [20, 50]
    make_hot(store, path[-1])
    assert store.rows.write(path[1:]) is new
    exact = store.rows.write(path[1:], sufficient=Provenance.EXACT)
    assert (path[0].file, path[1].file) == (new, exact)
    for node in path:
        store.rows.drop_hot(node)
    assert [p.p1 for p in store.plan_rows(path[-1], 0, 50, worst=Provenance.EXACT)] == [20, 50]
    assert check_rows(store, path[-1]) == 50
    store.check_integrity(keys=True)


def test_exact_rows_replace_hot_ones_that_are_not(store: Store) -> None:
    """The other way round they do not."""
    path = store.insert(IDS, "local", [50])
    rows = random_rows(LAYOUT, 0, 50)
    assert store.rows.attach_hot(path, rows, origin=Provenance.DERIVED) == path
    assert store.rows.attach_hot(path, rows, origin=Provenance.DERIVED) == []
    assert store.rows.attach_hot(path, rows) == path
    assert store.rows.attach_hot(path, rows) == []
    assert path[0].worst_hot == Provenance.EXACT
    assert store.state.hot_bytes == rows.nbytes
    store.check_integrity()


def test_promoted_rows_are_written_as_they_are(store: Store) -> None:
    """Hot rows from a stored format whose file was evicted go back to disk in that format."""
    leaf, file = one_leaf(store, (20, 50))
    new = reencode(store, file, FormatRequest(4, 40, "q6h"))
    for node in leaf.path():
        (part,) = store.plan_rows(node, node.p0, node.p1)
        store.rows.attach_hot([node], store.rows.load(part).copy())
    assert store.state.hot_bytes < 50 * LAYOUT.token_bytes
    store.rows.drop_file(new)
    assert store.rows.write(leaf.path()).runs == (
        FormatRun(0, 4, NATIVE),
        FormatRun(4, 36, "q6h"),
        FormatRun(40, 10, NATIVE),
    )
    for node in leaf.path():
        store.rows.drop_hot(node)
    assert check_rows(store, leaf) == 50


def test_extensions_stay(root: Path) -> None:
    """What is not a row of numbers is carried over as it is."""
    with Store.open(root, MROPE) as store:
        (leaf,) = store.insert(IDS, "local", [50])
        make_hot(store, leaf)
        file = store.rows.write([leaf])
        store.rows.drop_hot(leaf)
        reencode(store, file, FormatRequest(4, 50, "q4h"))
        assert check_rows(store, leaf) == 50
        assert store.verify().ok


def test_rows_of_removed_segments_are_left_out(store: Store) -> None:
    """A file whose lower segments went is written without their rows."""
    path = store.insert(IDS, "local", [20, 50])
    write_all(store, path[-1])
    assert path[0].file is not None
    planned = store.plan_rows(path[-1], 0, 50)
    store.pins.add(path[0].id)
    assert store.gc().segments == 1
    new = reencode(store, path[0].file, FormatRequest(4, 20, "q4h"))
    assert (new.p0, new.n_rows) == (0, 20)
    assert len(store.rows.load(planned[0])) == 20
    with pytest.raises(RowsDamaged, match="dropped"):
        store.rows.load(planned[1])
    store.check_integrity(keys=True)


def test_hot_rows_of_another_layout_are_refused(store: Store) -> None:
    """Neither cache types nor stored planes that this model's rows would not have."""
    (leaf,) = store.insert(IDS, "local", [50])
    other = KVLayout(LAYOUT.k, (plane_of("q4_0", 32), plane_of("q4_0", 32)))
    assert other.converts_to(LAYOUT)
    with pytest.raises(StateError, match="layout"):
        store.rows.attach_hot([leaf], random_rows(other, 0, 50))
    half = LAYOUT.stored_as("q4h")
    mixed = KVLayout(half.k, (half.v[0], LAYOUT.v[1]))
    rows = random_rows(LAYOUT, 0, 50)
    planes = (np.zeros((50, mixed.v[0].row_bytes), np.uint8), rows.v[1])
    with pytest.raises(StateError, match="layout"):
        store.rows.attach_hot([leaf], KVRows(mixed, rows.positions, rows.k, planes))


def test_turns_over_shrunk_segments(root: Path) -> None:
    """A session whose past is in a stored format grows as any other."""
    with Store.open(root, ROW_IDENTITY) as store:
        prompt = IDS[:30].tolist()
        first = store.commit_turn(turn_of(prompt, [1, 2, 3], session="s")).node
        write_all(store, first)
        assert first.file is not None
        reencode(store, first.file, FormatRequest(4, 32, "q6h"))
        longer = [*prompt, 1, 2, 3, 9, 9]
        second = store.commit_turn(turn_of(longer, [4, 5], session="s")).node
        assert first in second.path()
        make_hot(store, second)
        for node in second.path():
            if node.file is None:
                store.rows.write([node])
            store.rows.drop_hot(node)
        assert check_rows(store, second) == second.p1
        store.check_integrity(keys=True)
