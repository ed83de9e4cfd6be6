"""SegmentFile: an immutable file of rows, mapped on use; each piece is checked once."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from towerd.codec.errors import CodecError, NewerVersion
from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis
from towerd.codec.rows.coded import CodedRows, PageDamaged
from towerd.kernels import dispatch
from towerd.slots.blob import parse_rows
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.row_identity import RowIdentity
from towerd.slots.rows import HeadRows, KVRows
from towerd.store.files.file_map import PLAIN_FILES, FileMap, StoreFiles
from towerd.store.segments.coded_format import CodedPiece, coding_of, is_coded
from towerd.store.segments.mapped import MAPPED
from towerd.store.segments.segment_header import (
    PREAMBLE,
    BlobEntry,
    CodedEntry,
    FormatRun,
    HeadEntry,
    PlaneEntry,
    RunEntry,
    SegmentHeader,
    Span,
    check_layout,
    checksum,
    decode_head,
    native_run,
    provenance_of,
    segment_key,
    worst_of,
)
from towerd.store.segments.transform_bases import BasisLost, TransformBases
from towerd.tokens import ID_BYTES, Provenance, Provenances

log = logging.getLogger(__name__)

ANY_HEAD = b""
"""Stands for the digest of whatever head a file has rows of."""


DECODED_ROWS = 512
"""Transform-coded rows that are decoded at once: the caller uses them while the next are decoded."""

Ranges: TypeAlias = list[tuple[int, int]]
"""Positions [p0, p1), ascending."""


class RowsLost(StateError):
    """Some transform-coded rows of a file cannot be read; all others can.

    ranges: their positions"""

    def __init__(self, ranges: Ranges, why: str) -> None:
        super().__init__(why)
        self.ranges = ranges


@dataclass(frozen=True, slots=True)
class Claim:
    """The catalog's record of a file's content. The file must match it before it is used."""

    row_identity: RowIdentity
    scopes: frozenset[str]
    """Those that the file may be of: of the nodes that view it, and the public ones, whose rows they may
    share."""
    prefix: bytes
    """Ids [0, p) of a path through the file's rows, p > the file's p0."""
    views: Sequence[tuple[int, bytes]]
    """(p0, ids) of every node that views the file."""


class SegmentFile:
    """A catalogued file with the rows [p0, p0 + n_rows)."""

    __slots__ = (
        "_checked", "_files", "_header", "_is_head_damaged", "_lock", "_mapped", "_start", "dropped",
        "id", "in_bucket_until", "n_rows", "nbytes", "p0", "path", "runs", "successor",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        path: Path,
        p0: int,
        n_rows: int,
        nbytes: int,
        runs: tuple[FormatRun, ...] = (),
        files: StoreFiles = PLAIN_FILES,
    ) -> None:
        self._files = files
        self.id = id
        self.path = path
        self.p0 = p0
        self.n_rows = n_rows
        self.nbytes = nbytes
        """Size of its content: on disk, encrypted, it has a four-thousandth more."""
        self.runs = runs or native_run(n_rows)
        """The format of each run of rows."""
        self.successor: SegmentFile | None = None
        """The file that replaced this one, if it was dropped for that reason."""
        self.dropped = False
        self.in_bucket_until = 0.0
        """time.monotonic() until which the shared tier is taken to have all its rows, too, and to keep them."""
        self._checked: set[int] = set()
        """Offsets of the planes and blobs whose checksums matched."""
        self._mapped: weakref.ref[FileMap] | None = None
        self._header: SegmentHeader | None = None
        self._is_head_damaged = False
        self._start = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SegmentFile({self.id}, {self.path.name}, [{self.p0}, {self.p0 + self.n_rows}))"

    @property
    def is_native(self) -> bool:
        """True when no row is in a stored format."""
        return all(run.format == NATIVE for run in self.runs)

    def is_decoded(self, p0: int, p1: int) -> bool:
        """Whether any of the rows [p0, p1) is transform-coded or was: native, and yet approximate."""
        row0, row1 = p0 - self.p0, p1 - self.p0
        return any(run.is_decoded and run.row0 < row1 and row0 < run.end for run in self.runs)

    def run_bytes(self, run: FormatRun, native: KVLayout) -> int:
        """Bytes of the rows of a run, without headers and padding but for transform-coded ones, which are
        counted by what is left of the file."""
        if not is_coded(run.format):
            return run.n_rows * native.stored_as(run.format).token_bytes
        coded_rows = sum(each.n_rows for each in self.runs if is_coded(each.format))
        others = sum(
            each.n_rows * native.stored_as(each.format).token_bytes
            for each in self.runs
            if not is_coded(each.format)
        )
        return max(0, self.nbytes - others) * run.n_rows // coded_rows

    def provenance(self, p0: int, p1: int) -> Provenances:
        """That of each position in [p0, p1), uint8[p1 - p0]."""
        return provenance_of(self.runs, p0 - self.p0, p1 - self.p0)

    def worst(self, p0: int, p1: int) -> Provenance:
        """The worst provenance of the rows [p0, p1)."""
        return worst_of(self.runs, p0 - self.p0, p1 - self.p0)

    @property
    def is_mapped(self) -> bool:
        """Whether rows of it are in use: it takes disk as long as they are, dropped or not."""
        return self._mapped is not None and self._mapped() is not None

    @property
    def in_bucket(self) -> bool:
        """Whether the shared tier has all its rows, too, as far as this process knows."""
        return time.monotonic() < self.in_bucket_until

    @property
    def is_open(self) -> bool:
        """Whether the header was read and matches the catalog."""
        return self._header is not None

    def open(self, claim: Claim) -> None:
        """Check the header, once per process. Raises StateError (damaged, foreign) or OSError
        (cannot be opened)."""
        with self._lock:
            if self._header is None:
                self._header, self._start = self._read_header(self._map(), claim)

    def verify(self, claim: Claim, pool: Executor, bases: TransformBases) -> None:
        """Check the whole file, even if checked before. Raises as `open`; RowsLost if only
        transform-coded rows are damaged."""
        with self._lock:
            data = self._map()
        header, start = self._read_header(data, claim)
        check_pieces(data, header.pieces, start, pool)
        with self._lock:
            self._header, self._start = header, start
            self._checked = {piece.offset for piece in header.pieces}
            self._is_head_damaged = False
        check_coded(data, header, start, bases)

    def _read_header(self, data: FileMap, claim: Claim) -> tuple[SegmentHeader, int]:
        """The header and the offset of the data."""
        header, start = head_of(data)
        self._check_identity(header)
        check_layout(header, claim.row_identity.layout)
        check_claim(header, claim)
        return header, start

    def rows(
        self,
        layout: KVLayout,
        p0: int,
        p1: int,
        pool: Executor | None,
        head: bytes | None = None,
        *,
        bases: TransformBases,
    ) -> Iterator[KVRows]:
        """Rows [p0, p1) as views of the mapped file, which they keep alive. Each part is a run of
        planes or a blob, in the run's format, and is checked once per process when it is
        requested: the first with `pool`, later ones while the caller uses those before them.
        Transform-coded rows are decoded, a part at a time, into native ones in memory of their own.
        `layout` is the native one. The file must be open.

        head: the digest of the head whose rows are wanted beside them, if the file has such; damaged
        ones count as none

        Raises OSError or StateError if the file is damaged or was removed, RowsLost if some of its
        transform-coded rows are, NewerVersion."""
        with self._lock:
            data, header, start = self._map(), self._header, self._start
        assert header is not None
        assert self.p0 <= p0 < p1 <= self.p0 + self.n_rows
        row0, row1 = p0 - self.p0, p1 - self.p0
        heads = self._heads(data, header, start, head)
        for rows in self._model_rows(data, header, start, layout, row0, row1, pool, bases):
            beside = None if heads is None else heads.slice(rows.p0, rows.p1)
            yield rows if beside is None else replace(rows, head=beside)

    def _model_rows(
        self,
        data: FileMap,
        header: SegmentHeader,
        start: int,
        layout: KVLayout,
        row0: int,
        row1: int,
        pool: Executor | None,
        bases: TransformBases,
    ) -> Iterator[KVRows]:
        for entry in header.runs:
            first, last = max(row0, entry.row0), min(row1, entry.row0 + entry.n_rows)
            if first < last and entry.coded:
                lost = (self.p0 + entry.row0, self.p0 + entry.row0 + entry.n_rows)
                basis = basis_of(header, entry, bases, lost)
                for piece, at in self._coded(data, start, entry, first, last, basis):
                    p0, p1 = max(self.p0 + first, at), min(self.p0 + last, at + piece.n_rows)
                    yield from _decoded(piece, basis, p0, p1)
            elif first < last and entry.blobs:
                yield from self._blob_rows(data, start, entry, layout, first, last, pool)
                pool = None
            elif first < last:
                self._ensure_checked(data, entry.planes, start, pool)
                yield self._run_rows(data, start, entry, layout, first, last)

    def carried(self, p0: int, p1: int, bases: TransformBases) -> Iterator[CodedPiece | KVRows]:
        """The transform-coded rows [p0, p1) of an open file, all of one run, to be written again as they are:
        whole pages coded, the rest decoded. Raises as `rows`."""
        with self._lock:
            data, header, start = self._map(), self._header, self._start
        assert header is not None
        row0, row1 = p0 - self.p0, p1 - self.p0
        entry = next(run for run in header.runs if row0 < run.row0 + run.n_rows)
        lost = (self.p0 + entry.row0, self.p0 + entry.row0 + entry.n_rows)
        basis = basis_of(header, entry, bases, lost)
        for piece, at in self._coded(data, start, entry, row0, row1, basis):
            first, last = max(p0, at), min(p1, at + piece.n_rows)
            begin, end = piece.whole_pages(first, last)
            if begin >= end:
                yield from _decoded(piece, basis, first, last)
                continue
            if first < begin:
                yield from _decoded(piece, basis, first, begin)
            yield CodedPiece(begin, end - begin, piece.excerpt(begin, end))
            if end < last:
                yield from _decoded(piece, basis, end, last)

    def head_rows(self, p0: int, p1: int) -> HeadRows | None:
        """What the file has of any head of the positions [p0, p1); it must be open."""
        with self._lock:
            data, header, start = self._map(), self._header, self._start
        assert header is not None
        heads = self._heads(data, header, start, ANY_HEAD)
        return None if heads is None else heads.slice(p0, p1)

    def _heads(
        self, data: FileMap, header: SegmentHeader, start: int, head: bytes | None
    ) -> HeadRows | None:
        if header.head is None or head not in (ANY_HEAD, header.head.digest):
            return None
        return self._head_rows(data, start, header.head)

    def _coded(
        self, data: FileMap, start: int, entry: RunEntry, row0: int, row1: int, basis: Basis
    ) -> Iterator[tuple[CodedRows, int]]:
        """The coded rows that have any of the file's rows [row0, row1), each with its first position."""
        at = entry.row0
        for each in entry.coded:
            if at < row1 and row0 < at + each.n_rows:
                yield parsed(data, each, start, self.p0 + at, basis), self.p0 + at
            at += each.n_rows

    def _blob_rows(
        self,
        data: FileMap,
        start: int,
        entry: RunEntry,
        layout: KVLayout,
        row0: int,
        row1: int,
        pool: Executor | None,
    ) -> Iterator[KVRows]:
        at = entry.row0
        for blob in entry.blobs:
            if at < row1 and row0 < at + blob.n_rows:
                taken = self._taken(data, blob, start, pool)
                rows = blob_rows(taken, blob, layout, self.p0 + at)
                yield rows.slice(self.p0 + row0, self.p0 + row1)
                pool = None
            at += blob.n_rows

    def _run_rows(
        self, data: FileMap, start: int, entry: RunEntry, layout: KVLayout, row0: int, row1: int
    ) -> KVRows:
        cut = np.s_[row0 - entry.row0 : row1 - entry.row0]
        planes = [_view(data, start, plane, entry.n_rows)[cut] for plane in entry.planes]
        ext = planes.pop().view(np.int32) if layout.cell_ext else None
        n_k = len(layout.k)
        positions = np.arange(self.p0 + row0, self.p0 + row1, dtype=np.int32)
        stored = layout.stored_as(entry.format)
        return KVRows(stored, positions, tuple(planes[:n_k]), tuple(planes[n_k:]), ext)

    def _head_rows(self, data: FileMap, start: int, entry: HeadEntry) -> HeadRows | None:
        """The rows of a head as views; None if they are damaged."""
        if self._is_head_damaged:
            return None
        try:
            self._ensure_checked(data, entry.planes, start, None)
        except StateError as error:
            self._is_head_damaged = True
            log.warning(
                "a chat's drafts begin anew: what was stored for them is damaged",
                extra={"file": self.path.name, "error": str(error)},
            )
            return None
        return head_rows(data, start, entry, self.p0)

    def _taken(
        self, data: FileMap, blob: BlobEntry, start: int, pool: Executor | None
    ) -> memoryview:
        """A blob's bytes, which are checked."""
        if not data.proves_itself:
            self._ensure_checked(data, (blob,), start, pool)
        taken = data.taken(start + blob.offset, blob.nbytes, pool)
        if data.proves_itself:
            MAPPED.read(blob.nbytes)
        return taken

    def _ensure_checked(
        self,
        data: FileMap,
        pieces: Sequence[PlaneEntry | BlobEntry],
        start: int,
        pool: Executor | None,
    ) -> None:
        for piece in pieces:
            data.need(start + piece.offset, piece.nbytes)
        if missing := [piece for piece in pieces if piece.offset not in self._checked]:
            check_pieces(data, missing, start, pool)
            with self._lock:
                self._checked.update(piece.offset for piece in missing)

    def _check_identity(self, header: SegmentHeader) -> None:
        if (header.p0, header.n, header.run_table) != (self.p0, self.n_rows, self.runs):
            raise StateError("the catalog describes another file under this name")

    def mapped(self) -> FileMap:
        """The whole file, which takes disk as long as this is in use. Raises OSError or StateError."""
        with self._lock:
            return self._map()

    def _map(self) -> FileMap:
        """The mapping, which lasts as long as rows of it are in use: it costs a descriptor, and
        what was read through it counts as memory of the process. What it read stays in the page
        cache, and to map and read 13 MB anew takes a tenth of a millisecond more."""
        data = self._mapped() if self._mapped is not None else None
        if data is None:
            data = self._files.map(self.path, self.nbytes)
            MAPPED.add(data)
            self._mapped = weakref.ref(data)
        return data


def head_of(data: FileMap) -> tuple[SegmentHeader, int]:
    """The header of a mapped file and the offset of its data. Raises as `decode_head`."""
    if len(data) >= PREAMBLE.size:
        n_header = PREAMBLE.unpack(data.view(0, PREAMBLE.size))[2]
        data.need(0, min(len(data), PREAMBLE.size + n_header))
    return decode_head(memoryview(data))


class FormatTally:
    """Rows of all files of one row identity, by format. Counted as files come and go; the store's
    lock guards it."""

    def __init__(self, native: KVLayout, files: Iterable[SegmentFile] = ()) -> None:
        self._native = native
        self.n_rows: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        """Without headers and padding."""
        self.moved_bytes = 0
        """Of the rows that were moved or computed from moved ones."""
        for file in files:
            self.add(file)

    def add(self, file: SegmentFile) -> None:
        """A file is there."""
        self._count(file, 1)

    def remove(self, file: SegmentFile) -> None:
        """A file is gone."""
        self._count(file, -1)

    def _count(self, file: SegmentFile, sign: int) -> None:
        for run in file.runs:
            nbytes = file.run_bytes(run, self._native)
            self.n_rows[run.format] += sign * run.n_rows
            self.nbytes[run.format] += sign * nbytes
            if run.origin == Provenance.AFTER_MOVED:
                self.moved_bytes += sign * nbytes

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the rows in block formats."""
        return sum(
            n for name, n in list(self.nbytes.items()) if name != NATIVE and not is_coded(name)
        )

    @property
    def coded_bytes(self) -> int:
        """Bytes of the transform-coded rows."""
        return sum(n for name, n in list(self.nbytes.items()) if is_coded(name))


def check_claim(header: SegmentHeader, claim: Claim) -> None:
    """Raises StateError unless row identity, scope, key and ids match the catalog."""
    digest = claim.row_identity.digest()
    if header.row_identity != digest:
        raise StateError("the file belongs to another model or configuration")
    if header.scope not in claim.scopes:  # adapters are part of it: they make other rows
        raise StateError("the file belongs to another tenant, or was made under other adapters")
    before = claim.prefix[: header.p0 * ID_BYTES]
    if segment_key(digest, header.scope, before + header.ids) != header.key:
        raise StateError("the file's key is not that of its tokens")
    for p0, ids in claim.views:
        at = (p0 - header.p0) * ID_BYTES
        if at < 0 or header.ids[at : at + len(ids)] != ids:
            raise StateError("the file's tokens are not the catalog's")


def check_pieces(
    data: FileMap,
    pieces: Sequence[PlaneEntry | BlobEntry],
    start: int,
    pool: Executor | None,
) -> None:
    """Raises StateError unless every checksum of the planes and blobs matches. pool: the threads
    to use; None: this thread."""

    def is_good(span: Span) -> bool:
        offset, n_bytes, expected = span
        is_same = checksum(data.view(start + offset, n_bytes)) == expected
        MAPPED.read(n_bytes)
        return is_same

    spans = [span for piece in pieces for span in piece.spans]
    results = map(is_good, spans) if pool is None else pool.map(is_good, spans)
    if not all(list(results)):
        raise StateError("a checksum does not match: the rows are damaged")


def check_coded(data: FileMap, header: SegmentHeader, start: int, bases: TransformBases) -> None:
    """Raises RowsLost unless all coded rows, and their bases, are whole; NewerVersion; OSError."""
    lost: Ranges = []
    why = ""
    for run in header.runs:
        at = header.p0 + run.row0
        for entry in run.coded:
            all_of_it = (at, at + entry.n_rows)
            try:
                basis = basis_of(header, run, bases, all_of_it)
                found = parsed(data, entry, start, at, basis).damaged()
            except RowsLost as error:
                found, why = error.ranges, str(error)
            lost += found
            at = all_of_it[1]
    if lost:
        raise RowsLost(lost, why or "a checksum does not match: coded rows are damaged")


def basis_of(
    header: SegmentHeader, run: RunEntry, bases: TransformBases, lost: tuple[int, int]
) -> Basis:
    """The basis of a transform-coded run. Raises RowsLost for the positions `lost` without it, NewerVersion."""
    coding, name = coding_of(run.format)
    try:
        basis = bases.get(name, header.row_identity)
    except BasisLost as error:
        raise RowsLost([lost], str(error)) from error
    if coding not in basis.codings:
        raise RowsLost([lost], f"the transform basis {name} has no coding {coding!r}")
    return basis


def parsed(data: FileMap, entry: CodedEntry, start: int, p0: int, basis: Basis) -> CodedRows:
    """The coded rows of an entry that begins at `p0`. Raises RowsLost, NewerVersion."""
    at = start + entry.offset
    try:
        found = coded.parse(data.view(at, entry.nbytes))
    except NewerVersion:
        raise
    except (CodecError, StateError) as error:
        raise RowsLost([(p0, p0 + entry.n_rows)], str(error)) from error
    if (found.p0, found.n_rows, found.basis_digest) != (p0, entry.n_rows, basis.digest):
        raise RowsLost([(p0, p0 + entry.n_rows)], "coded rows are others than their file says")
    return found


def _decoded(piece: CodedRows, basis: Basis, p0: int, p1: int) -> Iterator[KVRows]:
    """The rows [p0, p1), some at a time. Raises RowsLost."""
    assert basis.rope is not None
    step = DECODED_ROWS - (p0 - piece.p0) % piece.page_rows
    while p0 < p1:
        end = min(p1, p0 + step)
        try:
            yield piece.read(p0, end, basis, basis.rope, n_threads=dispatch.THREADS)
        except PageDamaged as error:
            raise RowsLost([(error.p0, error.p1)], str(error)) from error
        except CodecError as error:
            raise RowsLost([(piece.p0, piece.p1)], str(error)) from error
        p0, step = end, DECODED_ROWS


def blob_rows(data: memoryview, blob: BlobEntry, layout: KVLayout, p0: int) -> KVRows:
    """The rows of a blob, whose bytes are `data`, as views. Raises StateError unless it has rows of `layout` from `p0`."""
    rows = parse_rows(
        np.frombuffer(data, np.uint8),
        cell_ext=layout.cell_ext,
        has_window=layout.n_window > 0,
        layout=layout,
    )
    if (rows.p0, rows.p1, len(rows)) != (p0, p0 + blob.n_rows, blob.n_rows) or rows.blob is None:
        raise StateError("a blob holds other positions than its file says")
    return rows


def head_rows(data: FileMap, start: int, entry: HeadEntry, p0: int) -> HeadRows:
    """The rows of a head as views. p0: the file's first position"""
    layout = entry.layout
    planes = [_view(data, start, plane, entry.n) for plane in entry.planes]
    ext = planes.pop().view(np.int32) if layout.cell_ext else None
    positions = np.concatenate([np.arange(row0, row0 + n) for row0, n in entry.ranges]) + p0
    n_k = len(layout.k)
    k, v = tuple(planes[:n_k]), tuple(planes[n_k:])
    rows = KVRows(layout, positions.astype(np.int32), k, v, ext)
    return HeadRows(entry.digest, rows, entry.lag)


def _view(
    data: FileMap, start: int, plane: PlaneEntry, n: int
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    flat = np.frombuffer(data, np.uint8, plane.nbytes, start + plane.offset)
    return flat.reshape(n, plane.row_bytes)
