"""Native rows on disk are sequence blobs: several in a file, each checked by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from store_tools import MROPE, ROW_IDENTITY, assert_same_rows, rows_of, write_all

from towerd.errors import RowsDamaged
from towerd.slots.blob import emit_blob, parse_rows
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity
from towerd.slots.rows import KVRows
from towerd.store import Node, Store
from towerd.store.segments.segment_header import PREAMBLE, checksum, decode_head

SPAN_BYTES = 500
IDS = np.arange(100, 150, dtype=np.int32)
PLAIN = replace(ROW_IDENTITY, layout=KVLayout((Plane(1, 16),) * 2, (Plane(1, 32),) * 2))
NO_V = replace(ROW_IDENTITY, layout=KVLayout((Plane(1, 16),), ()))
WINDOW = replace(
    ROW_IDENTITY, layout=KVLayout((Plane(1, 64),) * 3, (Plane(1, 32),) * 3, n_window=2)
)


@pytest.fixture(autouse=True)
def small_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that 50 rows need several, and each of them several checksums."""
    for module in ("segment_header", "segment_writer"):
        monkeypatch.setattr(f"towerd.store.segments.{module}.SPAN_BYTES", SPAN_BYTES)
    n_bytes = 20 * ROW_IDENTITY.layout.token_bytes
    monkeypatch.setattr("towerd.store.segments.segment_writer.BLOB_BYTES_MAX", n_bytes)


def channels(row_identity_of_rows: RowIdentity, ids: npt.NDArray[np.int32], p0: int = 0) -> KVRows:
    """Rows as a context without flash attention gives them."""
    layout = row_identity_of_rows.layout
    blob = emit_blob([rows_of(ids, p0, layout)], layout=layout, v_trans=True)
    return parse_rows(blob, has_window=layout.n_window > 0, layout=layout)


def written(store: Store, *, v_trans: bool = False) -> Node:
    leaf = store.insert(IDS, "local", [50])[-1]
    if v_trans:
        store.rows.attach_hot([leaf], channels(store.state.row_identity, IDS))
        store.rows.write([leaf])
        store.rows.drop_hot(leaf)
    else:
        write_all(store, leaf)
    return leaf


def path_of(node: Node) -> Path:
    assert node.file is not None
    return node.file.path


@pytest.mark.parametrize("row_identity", [ROW_IDENTITY, PLAIN, NO_V, WINDOW, MROPE])
def test_rows_come_in_blobs(root: Path, row_identity: RowIdentity) -> None:
    """Each part is a view of a blob that llama.cpp takes back."""
    layout = row_identity.layout
    for v_trans in (False, True) if row_identity in (PLAIN, WINDOW) else (False,):
        with Store.open(root / str(v_trans), row_identity) as store:
            leaf = written(store, v_trans=v_trans)
            assert leaf.file is not None
            assert leaf.file.path.stat().st_size < 50 * layout.token_bytes + 3 * 4096
        with Store.open(root / str(v_trans), row_identity) as store:
            leaf = store.match(IDS, "local").nodes[-1]
            (part,) = store.plan_rows(leaf, 0, 50)
            at = 0
            for rows in store.rows.load_each(part):
                expected = rows_of(IDS[: rows.p1], at, layout)
                assert_same_rows(rows, expected)
                blob = emit_blob([expected], layout=layout, v_trans=v_trans)
                assert rows.blob is not None
                assert bytes(rows.blob) == bytes(blob)
                assert rows.v_trans == v_trans
                at = rows.p1
            assert at == 50
            for p0 in range(0, 50, 7):
                for p1 in range(p0 + 1, 51, 5):
                    (part,) = store.plan_rows(leaf, p0, p1)
                    loaded = store.rows.load(part)
                    assert (loaded.p0, loaded.p1) == (p0, p1)
                    for rows in loaded:
                        assert_same_rows(rows, rows_of(IDS[: rows.p1], rows.p0, layout))
            assert store.verify().ok


@pytest.mark.parametrize("v_trans", [False, True])
def test_what_is_before_the_damage_is_used(root: Path, v_trans: bool) -> None:
    """A blob is checked when it is asked for; the file is set aside all the same."""
    with Store.open(root, PLAIN) as store:
        path = path_of(written(store, v_trans=v_trans))
    head, start = decode_head(memoryview(path.read_bytes()))
    blobs = head.runs[0].blobs
    assert len(blobs) > 1
    with path.open("r+b") as handle:
        at = start + blobs[1].offset + blobs[1].nbytes - 1
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1]))
    with Store.open(root, PLAIN) as store:
        leaf = store.match(IDS, "local").nodes[-1]
        (part,) = store.plan_rows(leaf, 0, 50)
        pieces = store.rows.load_each(part)
        first = next(pieces)
        assert_same_rows(first, rows_of(IDS[: blobs[0].n_rows], 0, PLAIN.layout))
        with pytest.raises(RowsDamaged):
            next(pieces)
        assert not path.exists()
        assert_same_rows(first, rows_of(IDS[: blobs[0].n_rows], 0, PLAIN.layout))
        store.check_integrity(keys=True)
        assert store.verify().ok


@pytest.mark.parametrize("edit", ["position", "sequence", "cells", "type"])
def test_a_blob_is_read_before_it_is_believed(root: Path, edit: str) -> None:
    """Even with the right checksum: another position, sequence, number of cells or type."""
    with Store.open(root, PLAIN) as store:
        path = path_of(written(store))
    data = bytearray(path.read_bytes())
    head, start = decode_head(memoryview(data))
    blob = head.runs[0].blobs[0]
    at = start + blob.offset
    n = blob.n_rows
    place = {"position": at + 16, "sequence": at + 4, "cells": at + 12, "type": at + 24 + 12 * n}
    data[place[edit]] ^= 1
    spans = range(at, at + blob.nbytes, SPAN_BYTES)
    good = b"".join(checksum(bytes(data[i : min(i + SPAN_BYTES, at + blob.nbytes)])) for i in spans)
    assert len(good) > 16
    data = data.replace(blob.checksums, good)
    size = int.from_bytes(data[8:12], "little")
    body = bytes(data[PREAMBLE.size : PREAMBLE.size + size])
    data[16:32] = checksum(bytes(data[:16]), body)
    path.write_bytes(data)
    with Store.open(root, PLAIN) as store:
        assert not store.verify().ok
        leaf = store.match(IDS, "local").nodes[-1]
        (part,) = store.plan_rows(leaf, 0, 50)
        with pytest.raises(RowsDamaged):
            store.rows.load(part)
        assert (root / "quarantine" / path.name).exists()
