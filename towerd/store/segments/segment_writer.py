"""Writing one immutable segment file: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from towerd.kernels import dispatch
from towerd.slots.blob import blob_size, emit_blob
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import HeadRows, KVRows, check_positions
from towerd.slots.runs import Runs
from towerd.store.files.file_map import NewFile, StoreFiles
from towerd.store.segments.coded_format import CodedPiece, is_coded
from towerd.store.segments.segment_header import (
    CHECKSUM_BYTES,
    SPAN_BYTES,
    BlobEntry,
    CodedEntry,
    FormatRun,
    HeadEntry,
    PlaneEntry,
    RunEntry,
    SegmentHeader,
    Shape,
    checksum,
    encode_head,
    page_up,
    plane_shapes,
    written_origin,
)
from towerd.tokens import Provenance

CHUNK_BYTES = 1 << 22
BLOB_BYTES_MAX = 1 << 25
"""Maximum size of one sequence blob: it is checked as a whole and attached while the next is
checked. llama.cpp needs about 2 ms to accept one with a transposed V, however small it is."""
SUFFIX = ".twr"


@dataclass(frozen=True, slots=True)
class DraftRun:
    """Rows to store in one format. Parts in another format are encoded while they are written and
    must be native; transform-coded rows are in `pieces` and have no parts once they are encoded.

    coded_heads: what a head has of the rows in `pieces`"""

    parts: Sequence[KVRows]
    format: str
    origin: Provenance = Provenance.EXACT
    pieces: Sequence[CodedPiece] = ()
    coded_heads: Sequence[HeadRows] = ()

    @property
    def n_rows(self) -> int:
        """Rows of all parts or pieces."""
        n_coded = sum(piece.n_rows for piece in self.pieces)
        return n_coded + sum(len(part) for part in self.parts)

    @property
    def p0(self) -> int:
        """The first position."""
        return self.pieces[0].p0 if self.pieces else self.parts[0].p0

    @property
    def p1(self) -> int:
        """The last position plus one."""
        last = self.pieces[-1] if self.pieces else None
        return self.parts[-1].p1 if last is None else last.p0 + last.n_rows

    @property
    def heads(self) -> list[HeadRows]:
        """What heads have of its rows."""
        found = [part.head for part in self.parts if part.head is not None]
        return [*found, *self.coded_heads]


@dataclass(frozen=True, slots=True)
class Draft:
    """The content of a file to write: consecutive runs and their identity."""

    row_identity: bytes
    key: bytes
    scope: str
    ids: bytes
    native: KVLayout
    runs: Sequence[DraftRun]

    @property
    def p0(self) -> int:
        """The first position."""
        return self.runs[0].p0

    @property
    def p1(self) -> int:
        """The last position plus one."""
        return self.runs[-1].p1

    @property
    def heads(self) -> list[HeadRows]:
        """The rows of a head beside those of the model; of several heads those of the last."""
        found = [head for run in self.runs for head in run.heads]
        return [
            head
            for head in found
            if (head.digest, head.rows.layout) == (found[-1].digest, found[-1].rows.layout)
        ]

    @property
    def run_table(self) -> tuple[FormatRun, ...]:
        """The runs as the catalog lists them."""
        table: list[FormatRun] = []
        for run in self.runs:
            at = table[-1].end if table else 0
            table.append(FormatRun(at, run.n_rows, run.format, run.origin))
        return tuple(table)


@dataclass(frozen=True, slots=True)
class _PlaneExtent:
    """The place of one plane of one run in the file."""

    run: DraftRun
    native: KVLayout
    """The layout of the run's rows when they are native."""
    index: int
    """Index among the run's planes."""
    shape: Shape
    offset: int
    nbytes: int
    n_sums = 1

    def entry(self, digest: bytes) -> PlaneEntry:
        return PlaneEntry(*self.shape, self.offset, self.nbytes, digest)

    def chunks(self) -> Iterator[memoryview]:
        """The bytes to write, in order."""
        for part in self.run.parts:
            yield from _encoded(part, self)


@dataclass(frozen=True, slots=True)
class _BlobExtent:
    """The place of some native rows in the file, as one sequence blob."""

    parts: Sequence[KVRows]
    native: KVLayout
    offset: int
    nbytes: int

    @property
    def n_sums(self) -> int:
        """Number of checksums of the blob."""
        return -(-self.nbytes // SPAN_BYTES)

    def entry(self, digest: bytes) -> BlobEntry:
        return BlobEntry(sum(map(len, self.parts)), self.offset, self.nbytes, digest)

    def chunks(self) -> Iterator[memoryview]:
        """The bytes to write. V is transposed if it is so in the first rows."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.blob is not None:
            yield first.blob.data
        else:
            yield emit_blob(self.parts, layout=self.native, v_trans=first.v_trans, n_threads=1)


@dataclass(frozen=True, slots=True)
class _CodedExtent:
    """The place of some transform-coded rows in the file."""

    piece: CodedPiece
    offset: int
    n_sums = 0

    @property
    def nbytes(self) -> int:
        """Size of the piece."""
        return len(self.piece.data)

    def entry(self, digest: bytes) -> CodedEntry:
        return CodedEntry(self.piece.n_rows, self.offset, self.nbytes)

    def chunks(self) -> Iterator[memoryview]:
        """The bytes to write."""
        yield memoryview(self.piece.data)


_Extent: TypeAlias = _PlaneExtent | _BlobExtent | _CodedExtent


def new_name() -> str:
    """A random, unique file name."""
    return secrets.token_hex(16) + SUFFIX


def write_segment(
    files: StoreFiles,
    draft: Draft,
    name: str,
    tmp: Path,
    final: Path,
    pool: Executor,
    pause: Callable[[], None] = lambda: None,
) -> int:
    """Write `final/name` durably through `tmp/name`; returns its size in bytes. pause: called before
    each chunk of a few MB.

    Raises OSError; nothing is then left behind."""
    table, n_data = _place(draft)
    blank = [[bytes(CHECKSUM_BYTES * extent.n_sums) for extent in extents] for extents in table]
    start = len(encode_head(_header(draft, table, blank)))
    with files.create(tmp / name, final / name, start + n_data) as file:
        digests = _write_extents(file, start, table, pool, pause)
        head = encode_head(_header(draft, table, digests))
        assert len(head) == start
        file.write(memoryview(head), 0)
    return start + n_data


def _write_extents(
    file: NewFile,
    start: int,
    table: Sequence[Sequence[_Extent]],
    pool: Executor,
    pause: Callable[[], None],
) -> list[list[bytes]]:
    """Write planes in parallel and then blobs, which are large, one after the other; returns
    their checksums by run."""
    jobs: dict[int, Future[bytes]] = {}
    extents = [extent for row in table for extent in row]
    try:
        for extent in extents:
            if isinstance(extent, _PlaneExtent):
                jobs[extent.offset] = pool.submit(_write_extent, file, start, extent, pause)
    finally:
        wait(jobs.values())  # the caller closes the file next: no job may outlive this
    digests = {offset: job.result() for offset, job in jobs.items()}
    for extent in extents:
        if not isinstance(extent, _PlaneExtent):
            digests[extent.offset] = _write_extent(file, start, extent, pause)
    return [[digests[extent.offset] for extent in row] for row in table]


def _header(
    draft: Draft, table: Sequence[Sequence[_Extent]], digests: Sequence[Sequence[bytes]]
) -> SegmentHeader:
    runs = []
    entries_of = [
        [extent.entry(digest) for extent, digest in zip(extents, sums, strict=True)]
        for extents, sums in zip(table, digests, strict=True)
    ]
    for run, entries in zip(draft.run_table, entries_of, strict=False):
        planes = [entry for entry in entries if isinstance(entry, PlaneEntry)]
        blobs = [entry for entry in entries if isinstance(entry, BlobEntry)]
        coded = [entry for entry in entries if isinstance(entry, CodedEntry)]
        origin = written_origin(run.origin)
        runs.append(RunEntry(run.row0, run.n_rows, run.format, origin, planes, blobs, coded))
    head = _head_entry(draft, entries_of[-1]) if draft.heads else None
    return SegmentHeader(
        draft.row_identity, draft.key, draft.scope, draft.p0, draft.p1, draft.ids, runs, head
    )


def _head_entry(draft: Draft, entries: Sequence[PlaneEntry | BlobEntry | CodedEntry]) -> HeadEntry:
    rows = np.concatenate([head.rows.positions for head in draft.heads]) - draft.p0
    ends = np.flatnonzero(np.diff(rows, append=rows[-1] + 2) > 1) + 1
    ranges = [(int(run[0]), len(run)) for run in np.split(rows, ends[:-1])]
    planes = [entry for entry in entries if isinstance(entry, PlaneEntry)]
    last = draft.heads[-1]
    return HeadEntry(last.digest, ranges, planes, last.lag)


def _place(draft: Draft) -> tuple[list[list[_Extent]], int]:
    """Place each plane and blob at a page boundary. Returns those of every run, then those of a head if
    there is one, and the end of the last one."""
    for before, after in pairwise(draft.runs):
        if before.p1 != after.p0:
            raise StateError(f"a run ends at position {before.p1}, the next begins at {after.p0}")
    table: list[list[_Extent]] = []
    end = 0
    for run in draft.runs:
        if is_coded(run.format):
            table.append(list(_pieces(run, page_up(end))))
            end = table[-1][-1].offset + table[-1][-1].nbytes
            continue
        check_positions(run.parts)
        place = _blobs if run.format == NATIVE else _planes
        table.append(list(place(run, draft.native, page_up(end))))
        end = table[-1][-1].offset + table[-1][-1].nbytes
    if draft.heads:
        rows = [head.rows for head in draft.heads]
        table.append(list(_planes(DraftRun(rows, NATIVE), rows[-1].layout, page_up(end))))
        end = table[-1][-1].offset + table[-1][-1].nbytes
    return table, end


def _planes(run: DraftRun, native: KVLayout, at: int) -> Iterator[_Extent]:
    for index, shape in enumerate(plane_shapes(native, run.format)):
        n_bytes = run.n_rows * shape[3]
        yield _PlaneExtent(run, native, index, shape, at, n_bytes)
        at = page_up(at + n_bytes)


def _pieces(run: DraftRun, at: int) -> Iterator[_Extent]:
    for piece in run.pieces:
        yield _CodedExtent(piece, at)
        at = at + len(piece.data)


def _blobs(run: DraftRun, native: KVLayout, at: int) -> Iterator[_Extent]:
    """As few blobs as possible of at most BLOB_BYTES_MAX, all of about the same size."""
    rows_max = max(1, BLOB_BYTES_MAX // native.token_bytes)
    step = -(-run.n_rows // -(-run.n_rows // rows_max))
    runs = Runs(tuple(run.parts))
    for p0 in range(runs.p0, runs.p1, step):
        parts = runs.slice(p0, min(p0 + step, runs.p1)).parts
        n_bytes = blob_size(native, sum(map(len, parts)))
        yield _BlobExtent(parts, native, at, n_bytes)
        at = page_up(at + n_bytes)


def _write_extent(file: NewFile, start: int, extent: _Extent, pause: Callable[[], None]) -> bytes:
    """Write a plane or a blob; returns its checksums: one for a plane, one for every SPAN_BYTES of
    a blob."""
    h, sums = xxhash.xxh3_128(), b""
    at = start + extent.offset
    for chunk in extent.chunks():
        pause()
        file.write(chunk, at)
        at += len(chunk)
        if isinstance(extent, _PlaneExtent):
            h.update(chunk)
        elif isinstance(extent, _BlobExtent):
            spans = (chunk[i : i + SPAN_BYTES] for i in range(0, len(chunk), SPAN_BYTES))
            sums += b"".join(map(checksum, spans))
    return sums or h.digest()


def _encoded(part: KVRows, extent: _PlaneExtent) -> Iterator[memoryview]:
    """The bytes to write of one part, in order."""
    if extent.shape[0] == "ext":
        assert part.ext is not None
        return _chunks(np.ascontiguousarray(part.ext).view(np.uint8).reshape(len(part), -1))
    rows = part.plane(extent.index)
    have = part.layout.planes[extent.index].format
    want = extent.native.stored_as(extent.run.format).planes[extent.index]
    if have == want.format:
        return _chunks(rows)
    return _converted(rows, have.name, want.format.name)


def _converted(rows: npt.NDArray[np.uint8], have: str, want: str) -> Iterator[memoryview]:
    """The rows in another format, a chunk at a time, so that memory stays bounded."""
    step = max(1, CHUNK_BYTES // rows.shape[1])
    for row in range(0, len(rows), step):
        yield dispatch.transcoded(rows[row : row + step], have, want, 1).reshape(-1).data


def _chunks(plane: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    """The plane's bytes in order; rows that lie apart are gathered a chunk at a time."""
    step = max(1, CHUNK_BYTES // plane.shape[1])
    for row in range(0, len(plane), step):
        chunk = np.ascontiguousarray(plane[row : row + step])
        yield chunk.reshape(-1).data
