"""The rows of a head that drafts, in the files of the model's rows and on their ways through the store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from reencoded import IDS, reencode
from store_tools import (
    LAYOUT,
    ROW_IDENTITY,
    assert_same_rows,
    check_rows,
    formats_of,
    ids_of,
    rows_of,
)

from towerd.errors import RowsDamaged
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout, Plane
from towerd.slots.rows import HeadRows, KVRows, join
from towerd.store import FormatRequest, Node, SegmentFile, Store
from towerd.store.segments.segment_header import (
    MAGIC,
    VERSION,
    decode_head,
    encode_head,
    unframed,
)

HEAD = KVLayout((Plane(1, 24),), (Plane(0, 16),))
"""A layer of other formats than the model's."""
HEADS = {
    "dense": HEAD,
    "two heads": KVLayout(HEAD.k * 2, HEAD.v * 2),
    "without V": KVLayout(HEAD.k, ()),
    "M-RoPE": replace(HEAD, cell_ext=True),
}
MINE, OTHER = b"m" * 32, b"o" * 32


def head_of(
    prefix: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]],
    p0: int = 0,
    layout: KVLayout = HEAD,
    digest: bytes = MINE,
) -> HeadRows:
    return HeadRows(digest, rows_of([-2, *(int(each) for each in prefix[1:])], p0, layout))


def with_head(ids: np.ndarray[tuple[int], np.dtype[np.int32]], head: HeadRows | None) -> KVRows:
    return replace(rows_of(ids), head=head)


def written(store: Store, head: HeadRows | None, ends: Sequence[int] = (50,)) -> Node:
    """A path with rows in one file and nowhere else; its leaf."""
    leaf = store.insert(IDS, "local", list(ends))[-1]
    store.rows.attach_hot(leaf.path(), with_head(IDS, head))
    store.rows.write(leaf.path())
    for node in leaf.path():
        store.rows.drop_hot(node)
    return leaf


def file_of(node: Node) -> SegmentFile:
    assert node.file is not None
    return node.file


def heads_of(store: Store, node: Node) -> list[HeadRows | None]:
    """What comes with the rows of a path."""
    parts = store.plan_rows(node, 0, node.p1)
    return [rows.head for part in parts for rows in store.rows.load(part)]


def check_heads(store: Store, node: Node, layout: KVLayout = HEAD) -> int:
    """Compare what comes with the rows of a path; returns how many rows of a head there are."""
    n = 0
    for head in heads_of(store, node):
        if head is not None:
            expected = head_of(node.prefix_ids()[: head.rows.p1], head.rows.p0, layout)
            assert_same_rows(head.rows, expected.rows)
            n += len(head.rows)
    return n


@pytest.mark.parametrize("kind", list(HEADS))
def test_they_come_back_with_those_of_the_model(root: Path, kind: str) -> None:
    """Out of memory, after a restart, and to none but their own head."""
    layout = HEADS[kind]
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        leaf = store.insert(IDS, "local", [20, 50])[-1]
        store.rows.attach_hot(leaf.path(), with_head(IDS, head_of(IDS, layout=layout)))
        hot = LAYOUT.token_bytes + layout.token_bytes
        assert store.state.hot_bytes == 50 * hot
        assert check_heads(store, leaf, layout) == 50
        store.rows.write(leaf.path())
        for node in leaf.path():
            store.rows.drop_hot(node)
        assert store.state.hot_bytes == 0
        assert (check_rows(store, leaf), check_heads(store, leaf, layout)) == (50, 50)
        store.check_integrity(keys=True)
    with Store.open(root, ROW_IDENTITY) as store:
        leaf = store.match(IDS, "local").nodes[-1]
        assert store.verify().ok
        assert check_rows(store, leaf) == 50
        assert heads_of(store, leaf) == [None, None]
        store.rows.head = OTHER
        assert heads_of(store, leaf) == [None, None]
        store.rows.head = MINE
        assert check_heads(store, leaf, layout) == 50


def test_a_split_is_two_views_of_one_file(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        leaf = written(store, head_of(IDS))
        store.insert(np.concatenate([IDS[:25], ids_of(1)]), "local", [26])
        assert [node.p1 for node in leaf.path()] == [25, 50]
        assert check_heads(store, leaf) == 50
        assert check_heads(store, leaf.path()[0]) == 25
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        assert check_heads(store, store.match(IDS, "local").nodes[-1]) == 50


@pytest.mark.parametrize("gone", [(0, 10), (10, 30), (30, 50)])
def test_a_head_may_lack_rows(root: Path, gone: tuple[int, int]) -> None:
    """Of a beginning, of a run in the middle, of the end; those that are there stay where they were."""
    all_of = head_of(IDS)
    ends = [(p0, p1) for p0, p1 in ((0, gone[0]), (gone[1], 50)) if p0 < p1]
    parts = [all_of.slice(p0, p1) for p0, p1 in ends]
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        rows = rows_of(IDS)
        cuts = [0, *sorted({p for pair in ends for p in pair} - {0, 50}), 50]
        pieces = [
            replace(rows.slice(p0, p1), head=all_of.slice(p0, p1) if (p0, p1) in ends else None)
            for p0, p1 in zip(cuts, cuts[1:], strict=False)
        ]
        leaf = store.insert(IDS, "local", [50])[-1]
        store.rows.attach_hot(leaf.path(), join(pieces))
        store.rows.write(leaf.path())
        store.rows.drop_hot(leaf)
        expected = [int(p) for part in parts if part is not None for p in part.rows.positions]
        (head,) = heads_of(store, leaf)
        assert head is not None
        assert head.rows.positions.tolist() == expected
        (part,) = store.plan_rows(leaf, 5, 45)
        (found,) = store.rows.load(part)
        assert found.head is not None
        assert found.head.rows.positions.tolist() == [p for p in expected if 5 <= p < 45]
        assert store.verify().ok


def test_re_encoding_keeps_them(root: Path) -> None:
    """Native, whichever head is loaded; formats are for what the model's answers depend on."""
    with Store.open(root, ROW_IDENTITY) as store:
        leaf = written(store, head_of(IDS), (20, 50))
        reencode(store, file_of(leaf), FormatRequest(4, 40, "q8"))
        assert formats_of(store, leaf) == [(20, "q8"), (10, NATIVE)]
        store.rows.head = MINE
        assert (check_rows(store, leaf), check_heads(store, leaf)) == (50, 50)
        assert store.verify().ok
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        assert check_heads(store, store.match(IDS, "local").nodes[-1]) == 50


def test_of_two_heads_the_last_is_stored(store: Store) -> None:
    store.rows.head = MINE
    leaf = store.insert(IDS, "local", [20, 50])[-1]
    for node, digest in zip(leaf.path(), (OTHER, MINE), strict=True):
        head = head_of(IDS[: node.p1], node.p0, digest=digest)
        rows = replace(rows_of(IDS[: node.p1], node.p0), head=head)
        store.rows.attach_hot([node], rows)
    store.rows.write(leaf.path())
    for node in leaf.path():
        store.rows.drop_hot(node)
    assert (check_rows(store, leaf), check_heads(store, leaf)) == (50, 30)


def flip(file: SegmentFile, *, of_head: bool) -> None:
    """Change a byte of the file's last plane of its head, or of its first blob."""
    with file.path.open("r+b") as handle:
        header, start = decode_head(memoryview(handle.read()))
        assert header.head is not None
        piece = header.head.planes[-1] if of_head else header.runs[0].blobs[0]
        handle.seek(start + piece.offset + piece.nbytes - 1)
        byte = handle.read(1)[0]
        handle.seek(-1, 1)
        handle.write(bytes([byte ^ 1]))


def test_damage_to_them_costs_the_chat_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; `verify` finds it, and its repair leaves them out."""
    with Store.open(root, ROW_IDENTITY) as store:
        flip(file_of(written(store, head_of(IDS))), of_head=True)
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        leaf = store.match(IDS, "local").nodes[-1]
        with caplog.at_level(logging.WARNING):
            assert (check_rows(store, leaf), check_heads(store, leaf)) == (50, 0)
            assert check_heads(store, leaf) == 0
        assert [each.message for each in caplog.records].count(
            "a chat's drafts begin anew: what was stored for them is damaged"
        ) == 1
        report = store.verify()
        assert [each.split(": ")[1] for each in report.problems] == [
            "the rows of its head are damaged, which costs drafts alone"
        ]
        assert store.verify(repair=True).quarantined == 0
        assert store.verify().ok
        assert (check_rows(store, leaf), check_heads(store, leaf)) == (50, 0)


def test_damage_is_not_copied(store: Store) -> None:
    """Re-encoding drops rows of a head that are damaged, and the file where the model's are."""
    leaf = written(store, head_of(IDS))
    file = file_of(leaf)
    store.rows.head = MINE
    assert check_heads(store, leaf) == 50
    flip(file, of_head=True)
    reencode(store, file, FormatRequest(4, 40, "q8"))
    assert (check_rows(store, leaf), check_heads(store, leaf)) == (50, 0)
    assert store.verify().ok
    store.rows.drop_file(file_of(leaf))
    leaf = written(store, head_of(IDS))
    flip(file_of(leaf), of_head=False)
    with pytest.raises(RowsDamaged):
        store.rows.reencode(file_of(leaf), [FormatRequest(4, 40, "q8")])
    assert leaf.file is None


def test_copies_have_memory_of_their_own(store: Store) -> None:
    """What is changed in a buffer after its rows were copied shows in no copy."""
    head = head_of(IDS).copy()
    rows = with_head(IDS, head)
    copies = [rows.copy(), rows.slice(10, 40).copy(), join(list(rows.split(20)))]
    for plane in head.rows.planes():
        plane[:] = 0
    for each in copies:
        assert each.head is not None
        expected = head_of(IDS[: each.p1], each.p0)
        assert_same_rows(each.head.rows, expected.rows)
    leaf = store.insert(IDS, "local", [20, 50])[-1]
    store.rows.attach_hot(leaf.path(), with_head(IDS, head))
    store.rows.unshare(leaf)
    assert leaf.hot is not None
    above = leaf.path()[0].hot
    assert above is not None
    assert not leaf.hot.buffers().keys() & above.buffers().keys()


def test_a_file_without_them_is_as_it_was(root: Path) -> None:
    """Byte for byte what a store without heads writes: the header has no word of them."""
    with Store.open(root, ROW_IDENTITY) as store:
        data = file_of(written(store, None)).path.read_bytes()
    body, _ = unframed(memoryview(data), MAGIC, VERSION, "segment")
    assert "head" not in msgspec.msgpack.decode(body)


def test_rows_that_depend_on_what_follows_stay_with_their_branch(root: Path) -> None:
    """The last row of a segment would be computed from a token that another one has, which may be another
    tenant's."""
    head = replace(head_of(IDS), lag=1)
    expected = [p for p in range(50) if p not in (19, 49)]
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        leaf = written(store, head, (20, 50))
        found = [each.rows.positions.tolist() for each in heads_of(store, leaf) if each is not None]
        assert sum(found, []) == expected
        store.insert(np.concatenate([IDS[:35], ids_of(1)]), "local", [36])
        assert check_heads(store, leaf) == 47
    with Store.open(root, ROW_IDENTITY) as store:
        store.rows.head = MINE
        leaf = store.match(IDS, "local").nodes[-1]
        assert {each.lag for each in heads_of(store, leaf) if each is not None} == {1}


def test_a_cut_in_memory_takes_no_row_of_the_branch_behind_it(store: Store) -> None:
    """A segment is cut where another chat leaves it, after its rows came."""
    store.rows.head = MINE
    leaf = store.insert(IDS, "local", [50])[-1]
    store.rows.attach_hot(leaf.path(), with_head(IDS, replace(head_of(IDS), lag=1)))
    other = store.insert(np.concatenate([IDS[:25], ids_of(1)]), "local", [26])[-1]
    (above, *_) = heads_of(store, other.path()[0])
    assert above is not None
    assert above.rows.positions.tolist() == list(range(24))
    store.check_integrity(keys=True)


def test_a_lag_of_more_rows_than_there_are_is_refused(store: Store) -> None:
    data = file_of(written(store, head_of(IDS))).path.read_bytes()
    header, start = decode_head(memoryview(data))
    assert header.head is not None
    for lag in (-1, 51, 2**64 - 1):
        head = msgspec.structs.replace(header.head, lag=lag)
        changed = encode_head(msgspec.structs.replace(header, head=head)) + data[start:]
        with pytest.raises(StateError):
            decode_head(memoryview(changed))
