"""Whole files of rows that leave for another store, and come from one: checked as a whole before they
leave, and before they are entered."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from towerd.errors import StoreError
from towerd.slots.errors import StateError
from towerd.store.files import durable
from towerd.store.files.directory import remove_file
from towerd.store.rows.rows import RowStore, adopt
from towerd.store.segments.segment_file import SegmentFile, check_coded, check_pieces, map_file
from towerd.store.segments.segment_header import (
    SegmentHeader,
    check_layout,
    decode_head,
    encode_head,
)
from towerd.store.segments.segment_writer import new_name, write_segment
from towerd.store.segments.transform_bases import TransformBases
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.tokens import ID_BYTES


def take_out(
    state: StoreState, rows: RowStore, file: SegmentFile, node: Node, pool: Executor
) -> tuple[SegmentHeader, memoryview]:
    """The rows that a file has up to the end of `node`, which views it: their header, as that of a file of their
    own, and the data behind it as a view, which stays readable when the file is dropped. Raises RowsDamaged or
    StoreError."""
    rows.verify(file, node)
    try:
        if file.p0 + file.n_rows == node.p1:
            data = memoryview(file.mapped())  # it counts as in use if it is dropped meanwhile
        else:  # the rest is another conversation's
            data = _beginning(state, rows, file, node, pool)
        header, start = decode_head(data)
    except (StateError, OSError, ValueError) as error:
        raise StoreError(f"{file.path} cannot be read again: {error}") from error
    return header, data[start:]


def _beginning(
    state: StoreState, rows: RowStore, file: SegmentFile, node: Node, pool: Executor
) -> memoryview:
    """A file without a name, with the rows up to the end of `node`."""
    with state.locked():
        prefix = node.prefix_bytes()
    draft, name, tmp = (
        rows.draft_again(file, node, prefix, file.p0),
        new_name(),
        state.directory.tmp,
    )
    with state.catalog.being_written(name):
        n_bytes = write_segment(draft, name, tmp, tmp, pool)
        state.directory.writes.add("reencoded", n_bytes)
        try:
            return memoryview(map_file(tmp / name, n_bytes))
        finally:
            remove_file(tmp / name)


def take_in(
    state: StoreState,
    header: SegmentHeader,
    data: Iterable[bytes | memoryview],
    n_bytes: int,
    ids: bytes,
    bases: TransformBases,
    pool: Executor,
    is_durable: bool,
) -> SegmentFile | None:
    """Write a file with this header and the data behind it, `n_bytes`, and let the nodes of its scope on the
    path of `ids` view it that lie within its rows and have none. None if there are no such nodes.

    is_durable: False leaves that to `durable.make_durable`: what a power cut takes until then is found to be damaged or
    missing when it is used, as any file is that lost its content

    Raises StateError (damaged, or of another model), DiskFull or StoreError; nothing is left behind then."""
    state.check_open()
    name, directory = new_name(), state.directory
    with state.catalog.being_written(name):  # gc must not delete it
        with durable.store_errors("rows cannot be written"):
            half, final = directory.tmp / name, directory.segments / name
            with durable.new_file(half, final, is_durable=is_durable) as fd:
                total = _write(fd, header, data, n_bytes)
                _check(fd, total, state, bases, pool)
        directory.writes.add("rows", total)
        file = None
        try:
            with state.locked():
                if nodes := _lacking(state, header, ids):
                    of = header.p0, header.n, header.run_table
                    file, _ = adopt(state, nodes, of, name, total)
        finally:
            if file is None:
                directory.remove(name)
    return file


def _write(fd: int, header: SegmentHeader, data: Iterable[bytes | memoryview], n_bytes: int) -> int:
    """Returns the size of the file."""
    head = encode_head(header)
    durable.reserve(fd, len(head) + n_bytes)
    durable.write_all(fd, memoryview(head), 0)
    at = len(head)
    for chunk in data:
        if at + len(chunk) > len(head) + n_bytes:
            raise StateError("there are more rows than the header says")
        durable.write_all(fd, memoryview(chunk), at)
        at += len(chunk)
    if at != len(head) + n_bytes:
        raise StateError("there are fewer rows than the header says")
    return at


def _check(fd: int, total: int, state: StoreState, bases: TransformBases, pool: Executor) -> None:
    """Raises StateError unless everything in the file is as its header says, and fits the model."""
    data = mmap.mmap(fd, total, prot=mmap.PROT_READ)
    header, start = decode_head(memoryview(data))
    check_layout(header, state.row_identity.layout)
    check_pieces(data, header.pieces, start, pool)
    check_coded(data, header, start, bases)


def _lacking(state: StoreState, header: SegmentHeader, ids: bytes) -> Sequence[Node]:
    """The nodes that are to view the file. Under the lock."""
    match = state.tree.match(ids[: header.p1 * ID_BYTES], header.scope)
    return [
        node
        for node in match.nodes
        if header.p0 <= node.p0 and node.p1 <= min(match.n, header.p1)
        if node.scope == header.scope and not node.has_rows
    ]
