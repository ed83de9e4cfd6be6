"""Whole files of rows that leave for another store, and come from one: checked as a whole before they
leave, and before they are entered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from towerd.errors import StoreError
from towerd.slots.errors import StateError
from towerd.store.files import durable
from towerd.store.files.directory import remove_file
from towerd.store.files.file_map import NewFile
from towerd.store.rows.rows import RowStore, adopt
from towerd.store.segments.segment_file import (
    SegmentFile,
    check_coded,
    check_pieces,
    head_of,
)
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
            data = file.mapped().whole()  # it counts as in use if it is dropped meanwhile
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
        files = state.directory.files
        n_bytes = write_segment(files, draft, name, tmp, tmp, pool)
        state.directory.writes.add("reencoded", n_bytes)
        try:
            return files.map(tmp / name, n_bytes).whole()
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
            head = encode_head(header)
            total = len(head) + n_bytes
            with directory.files.create(half, final, total, is_durable=is_durable) as new:
                _write(new, head, data, total)
                _check(new, state, bases, pool)
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


def _write(file: NewFile, head: bytes, data: Iterable[bytes | memoryview], total: int) -> None:
    file.write(memoryview(head), 0)
    at = len(head)
    for chunk in data:
        if at + len(chunk) > total:
            raise StateError("there are more rows than the header says")
        file.write(memoryview(chunk), at)
        at += len(chunk)
    if at != total:
        raise StateError("there are fewer rows than the header says")


def _check(file: NewFile, state: StoreState, bases: TransformBases, pool: Executor) -> None:
    """Raises StateError unless everything in the file is as its header says, and fits the model."""
    data = file.read_back()
    header, start = head_of(data)
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
