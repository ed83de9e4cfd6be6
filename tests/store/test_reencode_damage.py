"""Stored formats in damaged, hostile and old files and catalogs."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from old_segments import as_before_the_journal, in_planes
from reencoded import IDS, one_leaf, reencode
from store_tools import (
    FINGERPRINT,
    check_rows,
)

from towerd.errors import RowsDamaged, StoreError
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE
from towerd.store import FormatRequest, Store
from towerd.store.segments.format_run import FormatRun, decode_runs, encode_runs
from towerd.store.segments.segment_header import PREAMBLE, checksum, decode_head, page_up


def test_damage_is_not_copied(store: Store) -> None:
    """A file that was good once is checked again before its rows get new checksums."""
    leaf, file = one_leaf(store)
    assert check_rows(store, leaf) == 50
    with file.path.open("r+b") as handle:
        handle.seek(-100, os.SEEK_END)
        handle.write(b"damage")
        handle.seek(0)
        _, start = decode_head(memoryview(handle.read()))
        handle.seek(start + 3)
        handle.write(b"damage")
    with pytest.raises(RowsDamaged, match="damaged"):
        store.reencode(file, [FormatRequest(4, 50, "q4h")])
    assert leaf.file is None
    assert not file.path.exists()
    store.check_integrity(keys=True)


@pytest.mark.parametrize("place", ["native", "stored", "header"])
def test_damaged_stored_rows_are_set_aside(root: Path, place: str) -> None:
    """Every run has its checksums."""
    with Store.open(root, FINGERPRINT) as store:
        leaf, file = one_leaf(store)
        path = reencode(store, file, FormatRequest(4, 50, "q4h")).path
    with path.open("r+b") as handle:
        head, start = decode_head(memoryview(handle.read()))
        run = head.runs[place == "stored"]
        last = run.planes[-1] if run.planes else run.blobs[-1]
        at = 70 if place == "header" else start + last.offset + last.nbytes - 1
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1]))
    with Store.open(root, FINGERPRINT) as store:
        assert not store.verify().ok
        (part,) = store.plan_rows(store.match(IDS, "local"), 0, 50)
        with pytest.raises(RowsDamaged):
            store.load_rows(part)
        assert (root / "quarantine" / path.name).exists()
        store.check_integrity(keys=True)


def rewritten(path: Path, edit: Callable[[dict[str, object]], None]) -> None:
    """Change a file's header and give it a right checksum."""
    data = path.read_bytes()
    head, start = decode_head(memoryview(data))
    fields = msgspec.to_builtins(head, builtin_types=(bytes,))
    edit(fields)
    body = msgspec.msgpack.encode(fields)
    prefix = PREAMBLE.pack(b"TWRSEG", 2, len(body), 0, bytes(16))[:16]
    path.write_bytes((prefix + checksum(prefix, body) + body).ljust(start, b"\0") + data[start:])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("format", "layer table|not a stored format"),
        ("plane format", "layer table"),
        ("type", "layer table"),
        ("derived", "another file"),
        ("overlap", "follow one another"),
        ("fewer", "rows, not"),
    ],
)
def test_headers_that_contradict_are_refused(root: Path, what: str, message: str) -> None:
    """Formats and shapes come from our table and the model, never from the file alone."""
    with Store.open(root, FINGERPRINT) as store:
        _, file = one_leaf(store)
        path = reencode(store, file, FormatRequest(4, 50, "q4h")).path

    def edit(fields: dict[str, object]) -> None:
        runs = fields["runs"]
        assert isinstance(runs, list)
        if what == "format":
            runs[1][2] = "q9"
        elif what == "plane format":
            runs[1][4][3][4] = NATIVE
        elif what == "type":
            runs[1][4][3][2] = 263
        elif what == "derived":
            runs[0][3] = True
        elif what == "overlap":
            runs[1][0] = 3
        else:
            del runs[1]

    rewritten(path, edit)
    with Store.open(root, FINGERPRINT) as store:
        (problem,) = store.verify().problems
        (part,) = store.plan_rows(store.match(IDS, "local"), 0, 50)
        with pytest.raises(RowsDamaged, match=message):
            store.load_rows(part)
        assert path.name in problem


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        "[[50]]",
        '[[50, "q9", false]]',
        '[[49, "q4h", false]]',
        '[[-1, "q4h", false], [51, "q4h", false]]',
        "[]",
        '[[50, "f16", false]]',
    ],
)
def test_catalogs_with_impossible_runs_are_refused(root: Path, text: str) -> None:
    """As any other contradiction in the catalog."""
    with Store.open(root, FINGERPRINT) as store:
        one_leaf(store)
        with store.state.catalog.transaction():
            store.state.catalog.run("UPDATE files SET runs = ?", (text,))
    with pytest.raises(StoreError, match="damaged"):
        Store.open(root, FINGERPRINT)


def test_runs_as_text() -> None:
    """What is written to the catalog is read from it."""
    runs = (FormatRun(0, 4, NATIVE), FormatRun(4, 6, "q4h", True), FormatRun(10, 1, NATIVE, True))
    assert decode_runs(encode_runs(runs), 11) == runs
    assert decode_runs("", 11) == (FormatRun(0, 11, NATIVE),)
    with pytest.raises(StateError, match="11 rows, not 12"):
        decode_runs(encode_runs(runs), 12)


STATES = {20: b"state at 20" * 1000, 50: b"x"}
"""What files once carried behind their rows."""


def with_states(root: Path, version: int) -> None:
    """Turn the native files of a store into such as earlier builds wrote, with state checkpoints in
    them, and its catalog into one of version 5, which lists their positions."""
    as_before_the_journal(root)
    sizes = {}
    for path in (root / "segments").iterdir():
        data = path.read_bytes()
        fields, start, data = in_planes(data, FINGERPRINT.layout)
        if version == 1:
            ((*_, fields["planes"]),) = fields.pop("runs")
        fields["boundaries"] = []
        for position, state in STATES.items():
            data = data.ljust(page_up(len(data)), b"\0")
            entry = [position, len(data), len(state), checksum(state)]
            fields["boundaries"].append(entry)
            data += state
        body = msgspec.msgpack.encode(fields)
        prefix = PREAMBLE.pack(b"TWRSEG", version, len(body), 0, bytes(16))[:16]
        old = (prefix + checksum(prefix, body) + body).ljust(start, b"\0") + data
        path.write_bytes(old)
        sizes[path.name] = len(old)
    db = sqlite3.connect(root / "catalog.sqlite")
    db.execute("ALTER TABLE files ADD COLUMN boundaries BLOB NOT NULL DEFAULT x''")
    positions = np.array(list(STATES), "<i4").tobytes()
    for name, size in sizes.items():
        db.execute(
            "UPDATE files SET bytes = ?, boundaries = ? WHERE name = ?", (size, positions, name)
        )
    db.execute("PRAGMA user_version = 5")
    db.commit()
    db.close()


def as_version_1(root: Path) -> None:
    """Turn a store of native files into what the first build wrote."""
    with_states(root, 1)
    db = sqlite3.connect(root / "catalog.sqlite")
    db.execute("ALTER TABLE files DROP COLUMN runs")
    db.execute("ALTER TABLE bases DROP COLUMN format")
    db.execute("ALTER TABLE bases DROP COLUMN module")
    db.execute("DROP TABLE invocations")
    db.execute("DROP TABLE workflows")
    for name in ("blobs", "cold"):
        db.execute(f"DROP TABLE {name}")
    for name in ("warm", "used", "own", "id", "frozen"):
        db.execute(f"DROP INDEX sessions_{name}")
    db.execute("ALTER TABLE sessions DROP COLUMN cold_bytes")
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()


def test_a_store_of_the_first_version_is_taken_over(root: Path) -> None:
    """Its files are read, its catalog is migrated, and then it can be re-encoded."""
    with Store.open(root, FINGERPRINT) as store:
        leaf, _ = one_leaf(store, (20, 50))
        store.add_base("b", IDS[:20], "local", 1, False)
    as_version_1(root)
    with Store.open(root, FINGERPRINT) as store:
        leaf = store.match(IDS, "local").nodes[-1]
        assert leaf.file is not None
        assert check_rows(store, leaf) == 50
        assert store.verify().ok
        assert [base.format for base in store.bases()] == [None]
        reencode(store, leaf.file, FormatRequest(4, 50, "q4h"))
        assert check_rows(store, leaf) == 50
        store.check_integrity(keys=True)


def test_states_in_old_files_are_passed_over(root: Path) -> None:
    """Their rows are read, verified, split and re-encoded; the states, which have files of their
    own by now, go with the old file."""
    with Store.open(root, FINGERPRINT) as store:
        _, file = one_leaf(store)
        size = file.nbytes
    with_states(root, 2)
    with Store.open(root, FINGERPRINT) as store:
        leaf = store.match(IDS, "local").nodes[-1]
        assert leaf.file is not None
        assert leaf.file.nbytes > size + sum(map(len, STATES.values()))
        assert store.verify().ok
        store.insert(IDS[:20], "local", [20])
        assert check_rows(store, leaf) == 50
        reencode(store, leaf.file, FormatRequest(4, 50, "q4h"))
        assert STATES[20] not in leaf.file.path.read_bytes()
        assert check_rows(store, leaf) == 50
        assert store.verify().ok
        store.check_integrity(keys=True)
    with Store.open(root, FINGERPRINT) as store:
        assert check_rows(store, store.match(IDS, "local").nodes[-1]) == 50


def test_bases_keep_their_format(root: Path) -> None:
    """A base may ask for a format of its own."""
    with Store.open(root, FINGERPRINT) as store:
        store.add_base("a", IDS[:20], "local", 1, False, "q6h")
        store.add_base("b", IDS[:30], "local", 1, False)
        store.add_base("a", IDS[:20], "local", 1, False, "native")
    with Store.open(root, FINGERPRINT) as store:
        assert [(base.name, base.format) for base in store.bases()] == [
            ("a", "native"),
            ("b", None),
        ]
