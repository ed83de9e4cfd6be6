"""Hostile bytes: every region of a file, the catalog, the directory."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import OTHER_MODEL, ROW_IDENTITY, check_rows, make_hot, turn_of, write_all

from towerd.errors import RowsDamaged, StoreError, StoreVersion
from towerd.slots.errors import StateError
from towerd.store import Store, latest_row_identity
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.segments.segment_header import (
    PAGE,
    PREAMBLE,
    VERSION,
    checksum,
    decode_head,
    encode_head,
)

IDS = np.arange(100, 150, dtype=np.int32)


def one_file(root: Path) -> Path:
    """A store with one session of two nodes in one file, closed; the file."""
    with Store.open(root, ROW_IDENTITY) as store:
        node = store.commit_turn(turn_of(IDS[:30].tolist(), IDS[30:].tolist())).node
        make_hot(store, node)
        store.rows.write(node.path())
        assert node.file is not None
        return node.file.path


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def assert_quarantined(root: Path, path: Path) -> None:
    """Using the rows raises RowsDamaged once; then the tokens are there and the rows are not."""
    with Store.open(root, ROW_IDENTITY) as store:
        match = store.match(IDS, "local")
        assert match.n == 49
        report = store.verify()
        assert report.problems
        assert all(path.name in problem for problem in report.problems)
        parts = store.plan_rows(match, 0, 49)
        assert len(parts) == 2
        with pytest.raises(RowsDamaged):
            store.rows.load(parts[1])
        with pytest.raises(RowsDamaged):
            store.rows.load(parts[0])
        assert not path.exists()
        assert (root / "quarantine" / path.name).exists()
        assert store.state.warm_bytes == 0
        assert store.plan_rows(match, 0, 49) == []
        assert len(store.session_ids(store.sessions()[0].id)) == 50
        store.check_integrity(keys=True)
        assert store.verify().ok
    with Store.open(root, ROW_IDENTITY) as store:
        store.check_integrity(keys=True)
        store.gc(quarantine_days=1)
        assert len(list((root / "quarantine").iterdir())) == 1
        store.gc(quarantine_days=0)
        assert list((root / "quarantine").iterdir()) == []


def regions() -> dict[str, Callable[[bytes], int]]:
    """A byte in each part of the file."""

    def rows(share: float) -> Callable[[bytes], int]:
        def find(data: bytes) -> int:
            head, start = decode_head(memoryview(data))
            (blob,) = head.runs[0].blobs
            return start + blob.offset + int(share * (blob.nbytes - 1))

        return find

    return {
        "magic": lambda data: 0,
        "version": lambda data: 6,
        "length": lambda data: 8,
        "length, high": lambda data: 11,
        "zero": lambda data: 13,
        "checksum": lambda data: 20,
        "header, first": lambda data: PREAMBLE.size,
        "header, ids": lambda data: data.index(IDS[:5].tobytes()),
        "header, key": lambda data: PREAMBLE.size + 60,
        "blob, magic": rows(0),
        "blob, cells": rows(0.05),
        "blob, middle": rows(0.5),
        "blob, last byte": rows(1),
    }


@pytest.mark.parametrize("region", regions())
def test_every_region_is_checked(root: Path, region: str) -> None:
    """One flipped bit anywhere that counts and the rows are not used."""
    path = one_file(root)
    flip(path, regions()[region](path.read_bytes()))
    assert_quarantined(root, path)


@pytest.mark.parametrize("size", [0, 10, 31, 33, PAGE, PAGE + 1, -1])
def test_truncated_files_are_refused(root: Path, size: int) -> None:
    """A file of another size than catalogued is never mapped beyond its end."""
    path = one_file(root)
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    assert_quarantined(root, path)


def test_longer_file_is_refused(root: Path) -> None:
    """Nothing may be appended either."""
    path = one_file(root)
    with path.open("ab") as file:
        file.write(b"more")
    assert_quarantined(root, path)


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    """A link in place of a file cannot make the daemon read elsewhere."""
    path = one_file(root)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with Store.open(root, ROW_IDENTITY) as store:
        with pytest.raises(RowsDamaged):
            store.rows.load(store.plan_rows(store.match(IDS, "local"), 0, 49)[0])
        store.check_integrity()


def test_a_pipe_does_not_hang(root: Path) -> None:
    """Opening never blocks on what is no file."""
    path = one_file(root)
    path.unlink()
    os.mkfifo(path)
    with Store.open(root, ROW_IDENTITY) as store, pytest.raises(RowsDamaged):
        store.rows.load(store.plan_rows(store.match(IDS, "local"), 0, 49)[0])


def test_missing_files_are_forgotten_at_opening(root: Path) -> None:
    """Someone deleted it by hand: the tokens stay and the store is clean."""
    one_file(root).unlink()
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.plan_rows(store.match(IDS, "local"), 0, 49) == []
        store.check_integrity(keys=True)


def test_missing_file_while_open(root: Path) -> None:
    """The same, under a running daemon."""
    path = one_file(root)
    with Store.open(root, ROW_IDENTITY) as store:
        path.unlink()
        with pytest.raises(RowsDamaged):
            store.rows.load(store.plan_rows(store.match(IDS, "local"), 0, 49)[0])
        store.check_integrity()


@pytest.mark.parametrize(("whole", "message"), [(True, "tokens"), (False, "key")])
def test_files_cannot_stand_in_for_each_other(root: Path, whole: bool, message: str) -> None:
    """Two valid files with swapped names: identity is checked, not only checksums. Runs of the
    same tokens under other parents have other keys."""
    with Store.open(root, ROW_IDENTITY) as store:
        leaves = [
            store.commit_turn(turn_of([first, *range(30)], [1, 2])).node for first in (500, 600)
        ]
        for leaf in leaves:
            make_hot(store, leaf)
            store.rows.write(leaf.path() if whole else [leaf])
        paths = [leaf.file.path for leaf in leaves if leaf.file is not None]
    swap = root / "swap"
    paths[0].rename(swap)
    paths[1].rename(paths[0])
    swap.rename(paths[1])
    with Store.open(root, ROW_IDENTITY) as store:
        assert len(store.verify().problems) == 2
        for node in store.nodes():
            if node.file is not None:
                part = store.plan_rows(node, node.p0, node.p1)[0]
                with pytest.raises(RowsDamaged, match=message):
                    store.rows.load(part)


@pytest.mark.parametrize("scope", ["bob", "local~59ce0aab@0.5"])
def test_files_of_other_scopes_do_not_stand_in(root: Path, scope: str) -> None:
    """Another tenant's rows of the same tokens, or those made under an adapter, which are others."""
    with Store.open(root, ROW_IDENTITY) as store:
        paths = []
        for each in ("local", scope):
            turn = turn_of(IDS[:30].tolist(), IDS[30:].tolist(), scope=each)
            node = store.commit_turn(turn).node
            write_all(store, node)
            assert node.file is not None
            paths.append(node.file.path)
    shutil.copy(paths[1], paths[0])
    with Store.open(root, ROW_IDENTITY) as store:
        assert len(store.verify().problems) == 1
        with pytest.raises(RowsDamaged, match="another tenant"):
            check_rows(store, store.match(IDS, "local").nodes[-1])
        assert check_rows(store, store.match(IDS, scope).nodes[-1]) == 49


def test_vocabularies_do_not_stand_in_for_each_other(store: Store) -> None:
    """A conversation must not be read with the words of another tokenizer, or of another tenant."""
    kept = store.vocabularies
    for digest in (bytes(32), bytes([1] * 32)):
        kept.keep(digest, KeptVocabulary([b"%d" % digest[0], b"x"], [b"", b""]))
    assert kept.read(bytes(32)).text(IDS[:0]) == ""
    files = sorted(kept.folder.glob("*.vocab"))
    shutil.copy(files[1], files[0])
    with pytest.raises(StoreError, match="damaged"):
        kept.read(bytes(32))
    assert kept.read(bytes([1] * 32)).pieces[0] == b"1"


def test_verify_can_repair(root: Path) -> None:
    """With repair the damaged file is set aside."""
    path = one_file(root)
    flip(path, path.stat().st_size - PAGE)
    seen: list[tuple[int, int]] = []
    with Store.open(root, ROW_IDENTITY) as store:
        size = store.state.warm_bytes
        report = store.verify(lambda done, total: seen.append((done, total)), repair=True)
        assert (report.quarantined, report.ok, seen) == (1, False, [(size, size)])
        assert store.verify().ok


def test_verify_reads_other_models_files_too(root: Path) -> None:
    """Damage shows whichever model is being served."""
    path = one_file(root)
    flip(path, path.stat().st_size - PAGE)
    with Store.open(root, OTHER_MODEL) as store:
        assert path.name in store.verify().problems[0]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_headers_raise_state_error(data: st.DataObject) -> None:
    """Even with a right checksum, whatever the header says is bounds-checked."""
    body = data.draw(st.binary(max_size=200))
    size = data.draw(st.integers(0, 3 * PAGE))
    version = data.draw(st.sampled_from([VERSION - 1, VERSION]))
    prefix = PREAMBLE.pack(b"TWRSEG", version, len(body), 0, bytes(16))[:16]
    blob = (prefix + checksum(prefix, body) + body).ljust(size, b"\0")
    with pytest.raises(StateError):
        decode_head(memoryview(blob))


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_mutated_headers_never_reach_outside(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A header with one changed value either fails or keeps all extents inside the file."""
    whole = valid_file(tmp_path_factory)
    head, start = decode_head(memoryview(whole))
    fields = msgspec.to_builtins(head, builtin_types=(bytes,))
    number = data.draw(st.integers(-(2**63), 2**64 - 1) | st.integers(0, 10) | st.none())
    where = data.draw(st.sampled_from(["p0", "p1", "scope", "offset", "nbytes", "n_rows"]))
    if where in fields:
        fields[where] = number
    else:
        blob = data.draw(st.sampled_from(fields["runs"][0][5]))
        blob[{"n_rows": 0, "offset": 1, "nbytes": 2}[where]] = number
    body = msgspec.msgpack.encode(fields)
    prefix = PREAMBLE.pack(b"TWRSEG", VERSION, len(body), 0, bytes(16))[:16]
    head_bytes = (prefix + checksum(prefix, body) + body).ljust(start, b"\0")
    changed = head_bytes + whole[start:]
    try:
        found, at = decode_head(memoryview(changed))
    except StateError:
        return
    extents = [(plane.offset, plane.nbytes) for plane in found.pieces]
    for offset, nbytes in extents:
        assert 0 <= at + offset <= at + offset + nbytes <= len(changed)


_valid: list[bytes] = []


def valid_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if not _valid:
        _valid.append(one_file(tmp_path_factory.mktemp("valid") / "store").read_bytes())
    return _valid[0]


def test_head_round_trip(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is encoded is decoded, and the head fills whole pages."""
    head, start = decode_head(memoryview(valid_file(tmp_path_factory)))
    again = encode_head(head)
    assert len(again) == start
    assert start % PAGE == 0
    assert decode_head(memoryview(again + bytes(1 << 20))) == (head, start)


def write_catalog(root: Path, *statements: str) -> None:
    db = sqlite3.connect(root / "catalog.sqlite")
    db.execute("PRAGMA ignore_check_constraints = ON")
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE segments SET parent = 99 WHERE p0 > 0",
        "UPDATE segments SET p0 = 31, p1 = 50 WHERE p0 > 0",
        "UPDATE segments SET parent = NULL",
        "UPDATE segments SET parent = id",
        "UPDATE segments SET scope = 'other' WHERE p0 > 0",
        "UPDATE views SET row0 = 5",
        "UPDATE files SET n_rows = 9",
        "UPDATE views SET node = 77 WHERE id = 1",
        "UPDATE segments SET ids = x'' WHERE p0 = 0",
        "UPDATE files SET name = '../../etc/passwd'",
        "UPDATE files SET p0 = 3",
        "UPDATE fingerprints SET json = '{}'",
    ],
)
def test_contradictory_catalogs_are_refused(root: Path, statement: str) -> None:
    """A catalog that cannot be right is a StoreError that says what to do; with its journal it is
    rebuilt."""
    one_file(root)
    write_catalog(root, statement)
    journal = root / "journal"
    journal.rename(root / "elsewhere")
    with pytest.raises(StoreError, match="is damaged"):
        Store.open(root, latest_row_identity)
    shutil.rmtree(journal)
    (root / "elsewhere").rename(journal)
    with Store.open(root, latest_row_identity) as store:
        assert check_rows(store, store.match(IDS, "local").nodes[-1]) == 49
        assert store.verify().ok


def test_damaged_pages_of_the_catalog(root: Path) -> None:
    """Overwritten pages show as StoreError, never as a crash."""
    with Store.open(root, ROW_IDENTITY) as store:
        for n in range(200):
            store.commit_turn(turn_of([n, *range(50)], [1, 2]))
    shutil.rmtree(root / "journal")
    path = root / "catalog.sqlite"
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for page in range(1, len(data) // PAGE, 2):
        data[page * PAGE : page * PAGE + 200] = rng.bytes(200)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged"):
        Store.open(root, ROW_IDENTITY)
    assert path.read_bytes() == bytes(data)


def test_newer_and_foreign_catalogs(root: Path) -> None:
    """A future schema and another program's database are left unchanged."""
    one_file(root)
    write_catalog(root, "PRAGMA user_version = 99")
    with pytest.raises(StoreVersion, match="99"):
        Store.open(root, ROW_IDENTITY)
    write_catalog(root, "PRAGMA application_id = 1")
    shutil.rmtree(root / "journal")
    with pytest.raises(StoreVersion, match="not a towerd catalog"):
        Store.open(root, ROW_IDENTITY)


def test_no_descriptors_is_not_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of descriptors must not throw good rows away."""
    path = one_file(root)

    def out_of_files(*args: object) -> None:
        raise OSError(24, "Too many open files")

    with Store.open(root, ROW_IDENTITY) as store:
        (part, _) = store.plan_rows(store.match(IDS, "local"), 0, 49)
        with monkeypatch.context() as patch:
            patch.setattr("towerd.store.files.file_map.open_checked", out_of_files)
            with pytest.raises(StoreError, match="Too many") as caught:
                store.rows.load(part)
            assert not isinstance(caught.value, RowsDamaged)
        assert path.exists()
        assert check_rows(store, part.node) == part.node.p1
