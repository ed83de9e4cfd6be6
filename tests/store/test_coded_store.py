"""Transform-coded rows in the store: what comes back, and what damage costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crash import killed_at
from transformed import (
    IDENTITY,
    IDS,
    LAYOUT,
    basis,
    coded_rows_of,
    library_decodes,
    planes_of,
    same,
    transform,
    transformed,
    written,
)

from towerd.drift import DECODED
from towerd.errors import RowsDamaged
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout, Plane
from towerd.slots.rows import HeadRows, KVRows
from towerd.store import FormatRequest, Node, Store
from towerd.store.files.file_map import NewFile, PlainFiles
from towerd.store.segments.segment_header import decode_head, decode_runs
from towerd.tiers.promotion import Promoter
from towerd.tiers.writer import TierCounters
from towerd.tokens import Provenance

N = 1400


def opened(root: Path) -> Store:
    return Store.open(root, IDENTITY)


def leaf_of(store: Store) -> Node:
    return store.match(IDS, "local").nodes[-1]


def runs_of(leaf: Node) -> list[tuple[int, str]]:
    assert leaf.file is not None
    return [(run.n_rows, run.format) for run in leaf.file.runs]


def test_what_comes_back_is_what_the_codec_makes_of_it(root: Path) -> None:
    """Bit for bit, before and after a restart; sinks and tail are native, bytes fall."""
    with opened(root) as store:
        leaf = written(store, N)
        before = store.state.warm_bytes
        transformed(store, leaf, 4, N - 128)
        assert store.state.warm_bytes < before / 3
        store.check_integrity(keys=True)
    rows = coded_rows_of(N)
    with opened(root) as store:
        leaf = leaf_of(store)
        assert runs_of(leaf) == [(4, NATIVE), (N - 132, transform()), (128, NATIVE)]
        for p0, p1 in ((0, 4), (N - 128, N)):
            assert same(planes_of(store, leaf, p0, p1), rows.slice(p0, p1))
        whole = library_decodes(rows, 4, N - 128)
        for p0, p1 in ((4, N - 128), (100, 101), (700, 1100)):
            assert same(planes_of(store, leaf, p0, p1), whole.slice(p0, p1))
        (part,) = store.plan_rows(leaf, 0, N)
        assert set(part.provenance[4:-128].tolist()) == {Provenance.APPROXIMATE}
        assert not part.provenance[:4].any()
        assert not store.plan_rows(leaf, 0, N, worst=Provenance.EXACT)  # an exact request
        assert store.stats()["warm_coded_bytes"] == pytest.approx(
            store.state.warm_bytes - 132 * LAYOUT.token_bytes, abs=2
        )
        report = store.verify()
        assert report.ok, report.problems


def test_branches_and_deletions_carry_pages_over(root: Path) -> None:
    """A split views the same rows. What is written again is the same pages; the tokens of a deleted branch
    are in no file any more."""
    with opened(root) as store:
        leaf = written(store, N)
        transformed(store, leaf, 4, N - 128)
        whole = library_decodes(coded_rows_of(N), 4, N - 128)
        other = store.insert(np.concatenate([IDS[:700], [1, 2]]).astype(np.int32), "local", [702])[
            -1
        ]
        store.pins.add(other.id)
        assert same(planes_of(store, leaf, 4, N - 128), whole)
        assert store.gc().segments == 1
        (file,) = store.files()
        store.rows.reencode(file, ())
        (file,) = store.files()
        assert file.n_rows == 700
        upper = leaf_of(store)
        assert same(planes_of(store, upper, 4, 700), whole.slice(4, 700))
        assert runs_of(upper)[-1][1] == NATIVE  # the end of a page that was cut
        assert upper.worst_file == Provenance.APPROXIMATE
        assert upper.file is not None
        assert not (upper.file.provenance(4, 700) == Provenance.EXACT).any()
        store.check_integrity(keys=True)
        assert store.verify().ok


def test_what_is_coded_is_not_coded_again(store_of: Store) -> None:
    """Whatever is asked for; a block format is coded only if that is said."""
    leaf = written(store_of, 600)
    assert leaf.file is not None
    store_of.rows.bases.add(basis())
    q8 = store_of.rows.reencode(leaf.file, [FormatRequest(4, 300, "q8")])
    assert q8 is not None
    plain = store_of.rows.reencode(q8, [FormatRequest(0, 400, transform("small"))])
    assert plain is not None
    assert [run.format for run in plain.runs] == [
        transform("small"),
        "q8",
        transform("small"),
        NATIVE,
    ]
    again = store_of.rows.reencode(plain, [FormatRequest(0, 600, transform(), again=["q8"])])
    assert again is not None
    assert [(run.n_rows, run.format) for run in again.runs] == [
        (4, transform("small")), (296, transform()), (100, transform("small")), (200, transform()),
    ]  # fmt: skip
    last = store_of.rows.reencode(again, [FormatRequest(0, 600, "q4", again=[transform()])])
    assert last is not None
    assert last.runs == again.runs


def test_what_is_coded_is_not_cut_where_formats_change(store_of: Store) -> None:
    """A chat that is continued, whose beginning many share by now: only its old tail is coded."""
    leaf = written(store_of, 600)
    transformed(store_of, leaf, 4, 600 - 128)
    assert leaf.file is not None
    requests = [FormatRequest(4, 300, transform("small")), FormatRequest(300, 600, transform())]
    new = store_of.rows.reencode(leaf.file, requests)
    assert new is not None
    assert [(run.n_rows, run.format) for run in new.runs] == [(4, NATIVE), (596, transform())]
    first, last = (library_decodes(coded_rows_of(600), *each) for each in ((4, 472), (472, 600)))
    assert same(planes_of(store_of, leaf, 4, 472), first)
    assert same(planes_of(store_of, leaf, 472, 600), last)


def test_a_page_that_is_cut_keeps_what_a_head_has_of_it(store_of: Store) -> None:
    """As whole pages do."""
    plane, positions = (
        np.arange(2 * 700, dtype=np.uint8).reshape(700, 2),
        np.arange(700, dtype=np.int32),
    )
    of_head = KVRows(KVLayout((Plane(1, 2),), ()), positions, (plane,), ())
    leaf = store_of.insert(IDS[:700], "local", [450, 700])[-1]
    rows = replace(coded_rows_of(700), head=HeadRows(b"h" * 32, of_head))
    store_of.rows.attach_hot(leaf.path(), rows)
    store_of.rows.write(leaf.path())
    for node in leaf.path():
        store_of.rows.drop_hot(node)
    transformed(store_of, leaf, 4, 700 - 128)
    store_of.pins.add(leaf.path()[0].id)
    assert store_of.gc().segments == 1  # what lies behind the cut page
    (file,) = store_of.files()
    store_of.rows.reencode(file, ())
    store_of.rows.head = b"h" * 32
    (part,) = store_of.plan_rows(leaf_of(store_of), 0, 450)
    found = [each.head for each in store_of.rows.load(part).parts]
    assert (
        np.concatenate([each.rows.plane(0) for each in found if each]).tolist()
        == plane[:450].tolist()
    )


@pytest.fixture
def store_of(root: Path) -> Iterator[Store]:
    with opened(root) as store:
        yield store


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def page_at(path: Path, share: float) -> int:
    """A byte at this share of the coded rows of a file, behind their head."""
    data = path.read_bytes()
    header, start = decode_head(memoryview(data))
    entry = next(run for run in header.runs if run.coded).coded[0]
    return start + entry.offset + 900 + int((entry.nbytes - 901) * share)


@pytest.mark.parametrize("found_by", ["load", "verify", "reencode"])
def test_a_damaged_page_costs_its_rows(root: Path, found_by: str) -> None:
    """64 rows; all others are there, from the same file before and after a restart."""
    with opened(root) as store:
        path = transformed(store, written(store, N), 4, N - 128)
    flip(path, page_at(path, 0.5))
    whole = library_decodes(coded_rows_of(N), 4, N - 128)
    with opened(root) as store:
        leaf = leaf_of(store)
        if found_by == "load":
            with pytest.raises(RowsDamaged):
                store.rows.load(store.plan_rows(leaf, 0, N)[0])
        elif found_by == "verify":
            assert len(store.verify(repair=True).problems) == 1
        else:
            assert leaf.file is not None
            with pytest.raises(RowsDamaged):
                store.rows.reencode(leaf.file, [FormatRequest(0, N, "q4")])
        assert not path.exists()
        (lost,) = (node for node in leaf.path() if node.file is None)
        assert lost.n == 64
        store.check_integrity(keys=True)
    with opened(root) as store:
        leaf = leaf_of(store)
        assert store.verify().ok
        assert same(planes_of(store, leaf, 4, lost.p0), whole.slice(4, lost.p0))
        assert same(planes_of(store, leaf, lost.p1, N - 128), whole.slice(lost.p1, N - 128))
        assert same(planes_of(store, leaf, N - 128, N), coded_rows_of(N, N - 128))


def test_a_damaged_header_costs_the_file(root: Path) -> None:
    with opened(root) as store:
        path = transformed(store, written(store, N), 4, N - 128)
    flip(path, 90)
    with opened(root) as store:
        leaf = leaf_of(store)
        with pytest.raises(RowsDamaged):
            store.rows.load(store.plan_rows(leaf, 0, N)[0])
        assert leaf.file is None
        assert len(leaf.prefix_ids()) == N


@pytest.mark.parametrize("how", ["lost", "damaged", "another"])
def test_a_lost_basis_costs_what_it_coded(
    root: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokens, the native rows and other files stay; the log says it once."""
    with opened(root) as store:
        for seed in (0, 1):
            transformed(store, written(store, N, seed=seed), 4, N - 128)
        path = store.rows.bases.path(transform()[-16:])
    if how == "lost":
        path.unlink()
    elif how == "damaged":
        flip(path, path.stat().st_size // 2)
    else:
        path.write_bytes(basis(2).data)
    with opened(root) as store:
        for seed in (0, 1):
            ids = (IDS + 1000 * seed).astype(np.int32)
            leaf = store.match(ids, "local").nodes[-1]
            with pytest.raises(RowsDamaged):
                store.rows.load(store.plan_rows(leaf, 0, N)[0])
            kept = [node.n for node in leaf.path() if node.file is not None]
            assert kept == [4, 128]
            assert (leaf.prefix_ids() == ids).all()
        assert caplog.text.count("a transform basis is lost") == 1
        store.check_integrity(keys=True)


def test_bases_stay_as_long_as_a_segment_names_them(root: Path) -> None:
    """Those that none names go with a collection, but not what was written just now."""
    with opened(root) as store:
        leaf = written(store, N)
        transformed(store, leaf, 4, N - 128)
        store.rows.bases.add(basis(2))
        store.pins.add(leaf.id)
        paths = [store.rows.bases.path(transform(seed=seed)[-16:]) for seed in (1, 2)]
        store.gc()
        assert all(path.exists() for path in paths)
        for path in paths:
            os.utime(path, (0, 0))
        assert store.gc(dry_run=True).bytes_freed >= basis(2).nbytes
        store.gc()
        assert [path.exists() for path in paths] == [True, False]
        assert leaf.file is not None
        store.rows.drop_file(leaf.file)
        store.gc()
        assert not paths[0].exists()


def test_rows_that_were_decoded_are_written_as_approximate(root: Path) -> None:
    """Native, and yet never exact, also after their file is gone."""
    with opened(root) as store:
        leaf = written(store, N)
        transformed(store, leaf, 4, N - 128)
        runs = store.rows.load(store.plan_rows(leaf, 0, N)[0])
        assert leaf.file is not None
        store.rows.drop_file(leaf.file)
        store.rows.attach_hot([leaf], runs.copy(), origin=Provenance.APPROXIMATE)
        store.rows.write([leaf])
    with opened(root) as store:
        leaf = leaf_of(store)
        assert [run.format for run in leaf.file.runs] == [NATIVE] if leaf.file else False
        assert leaf.worst_file == Provenance.APPROXIMATE
        assert not store.plan_rows(leaf, 0, N, worst=Provenance.DERIVED)
        assert Promoter(store, TierCounters(), lambda: 1 << 30, 0.0).copy_up(leaf)
        assert leaf.worst_hot == Provenance.APPROXIMATE
        assert [run.format for run in store.plan_rows(leaf, 0, N)[0].decoded] == [DECODED]
        assert leaf.file is not None
        store.rows.bases.add(basis())
        again = store.rows.reencode(leaf.file, [FormatRequest(4, N - 128, transform())])
        assert again is not None
        assert [run.format for run in again.runs] == [NATIVE]


def test_a_plan_does_not_get_less_exact_rows(root: Path) -> None:
    """Rows that were planned as computed are planned again once they are transform-coded; those that are in
    a block format by then say so themselves."""
    with opened(root) as store:
        leaf = written(store, N)
        (plan,) = store.plan_rows(leaf, 0, N, worst=Provenance.EXACT)
        transformed(store, leaf, 4, N - 128)
        with pytest.raises(RowsDamaged):
            store.rows.load(plan)
        assert leaf.file is not None
        (plan,) = store.plan_rows(leaf, 0, N)
        assert store.rows.load(plan).p1 == N


@pytest.mark.parametrize("number", [1, 3, 6, 9, 12, 15])
def test_a_kill_leaves_the_old_file_or_the_new_one(root: Path, number: int) -> None:
    with opened(root) as store:
        written(store, N)

    def work() -> None:
        with opened(root) as store:
            transformed(store, leaf_of(store), 4, N - 128)

    killed_at(number, work)
    rows = coded_rows_of(N)
    with opened(root) as store:
        leaf = leaf_of(store)
        store.check_integrity(keys=True)
        found = planes_of(store, leaf, 4, N - 128)
        is_coded = leaf.file is not None and not leaf.file.is_native
        assert same(
            found, library_decodes(rows, 4, N - 128) if is_coded else rows.slice(4, N - 128)
        )
        store.gc()
        assert store.verify().ok


def test_a_basis_that_is_written_while_gc_runs(
    store_of: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its file is no leftover of a killed process."""
    create = PlainFiles.create

    @contextmanager
    def slowly(files: PlainFiles, half: Path, final: Path, n_bytes: int) -> Iterator[NewFile]:
        with create(files, half, final, n_bytes) as file:
            yield file
            store_of.gc()

    monkeypatch.setattr(PlainFiles, "create", slowly)
    name = store_of.rows.bases.add(basis())
    assert store_of.rows.bases.problem(name) is None


def test_names_that_are_none_are_refused() -> None:
    for name in ("t:", "t:near", "t:near:12", "t:near:" + "g" * 16, "t:a b:" + "0" * 16):
        with pytest.raises(StateError):
            decode_runs(f'[[5, "{name}", false]]', 5)
