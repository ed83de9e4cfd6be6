"""Stored formats in damaged, hostile and old files and catalogs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from reencoded import IDS, one_leaf, reencode
from store_tools import (
    ROW_IDENTITY,
    check_rows,
)

from towerd.errors import RowsDamaged, StoreError
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE
from towerd.store import FormatRequest, Store
from towerd.store.segments.segment_header import (
    PREAMBLE,
    FormatRun,
    checksum,
    decode_head,
    decode_runs,
    encode_runs,
)
from towerd.tokens import Provenance


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
        store.rows.reencode(file, [FormatRequest(4, 50, "q4h")])
    assert leaf.file is None
    assert not file.path.exists()
    store.check_integrity(keys=True)


@pytest.mark.parametrize("place", ["native", "stored", "header"])
def test_damaged_stored_rows_are_set_aside(root: Path, place: str) -> None:
    """Every run has its checksums."""
    with Store.open(root, ROW_IDENTITY) as store:
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
    with Store.open(root, ROW_IDENTITY) as store:
        assert not store.verify().ok
        (part,) = store.plan_rows(store.match(IDS, "local"), 0, 50)
        with pytest.raises(RowsDamaged):
            store.rows.load(part)
        assert (root / "quarantine" / path.name).exists()
        store.check_integrity(keys=True)


def rewritten(path: Path, edit: Callable[[dict[str, object]], None]) -> None:
    """Change a file's header and give it a right checksum."""
    data = path.read_bytes()
    head, start = decode_head(memoryview(data))
    fields = msgspec.to_builtins(head, builtin_types=(bytes,))
    edit(fields)
    body = msgspec.msgpack.encode(fields)
    prefix = PREAMBLE.pack(b"TWRSEG", 3, len(body), 0, bytes(16))[:16]
    path.write_bytes((prefix + checksum(prefix, body) + body).ljust(start, b"\0") + data[start:])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("format", "layer table|not a stored format"),
        ("plane format", "layer table"),
        ("type", "layer table"),
        ("derived", "another file"),
        ("moved", "another file"),
        ("origin", "are not known"),
        ("overlap", "follow one another"),
        ("fewer", "rows, not"),
    ],
)
def test_headers_that_contradict_are_refused(root: Path, what: str, message: str) -> None:
    """Formats and shapes come from our table and the model, never from the file alone."""
    with Store.open(root, ROW_IDENTITY) as store:
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
        elif what == "moved":
            runs[0][3] = int(Provenance.AFTER_MOVED)
        elif what == "origin":
            runs[0][3] = int(Provenance.MOVED)
        elif what == "overlap":
            runs[1][0] = 3
        else:
            del runs[1]

    rewritten(path, edit)
    with Store.open(root, ROW_IDENTITY) as store:
        (problem,) = store.verify().problems
        (part,) = store.plan_rows(store.match(IDS, "local"), 0, 50)
        with pytest.raises(RowsDamaged, match=message):
            store.rows.load(part)
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
        '[[50, "q4h", 5]]',
    ],
)
def test_catalogs_with_impossible_runs_are_refused(root: Path, text: str) -> None:
    """As any other contradiction in the catalog."""
    with Store.open(root, ROW_IDENTITY) as store:
        one_leaf(store)
        with store.state.catalog.transaction():
            store.state.catalog.run("UPDATE files SET runs = ?", (text,))
    with pytest.raises(StoreError, match="damaged"):
        Store.open(root, ROW_IDENTITY)


def test_runs_as_text() -> None:
    """What is written to the catalog is read from it."""
    derived, moved = Provenance.DERIVED, Provenance.AFTER_MOVED
    runs = (
        FormatRun(0, 4, NATIVE),
        FormatRun(4, 6, "q4h", derived),
        FormatRun(10, 1, NATIVE, moved),
    )
    text = encode_runs(runs)
    assert text == '[[4,"native",false],[6,"q4h",true],[1,"native",4]]'
    assert decode_runs(text, 11) == runs
    assert decode_runs("", 11) == (FormatRun(0, 11, NATIVE),)
    with pytest.raises(StateError, match="11 rows, not 12"):
        decode_runs(encode_runs(runs), 12)


def test_bases_keep_their_format(root: Path) -> None:
    """A base may ask for a format of its own."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.bases.add("a", IDS[:20], "local", 1, False, "q6h")
        store.bases.add("b", IDS[:30], "local", 1, False)
        store.bases.add("a", IDS[:20], "local", 1, False, "native")
    with Store.open(root, ROW_IDENTITY) as store:
        assert [(base.name, base.format) for base in store.bases.listing()] == [
            ("a", "native"),
            ("b", None),
        ]
