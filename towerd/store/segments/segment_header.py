"""The head of a segment file: its key, its runs of rows in one format each, and the reading and writing of
preamble and msgpack header.

    0   magic "TWRSEG"
    6   u16  version
    8   u32  header length in bytes
    12  u32  0
    16  xxh3_128 of bytes [0, 16) and the header
    32  header (msgpack), then zeros up to the next page
    d   data, d = the first page boundary after the header

Offsets in the header count from d. Rows in a stored format are kept in planes. Native rows are kept
in sequence blobs, the exact bytes that the context accepts: they are attached from the mapped file
without another copy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import msgspec
import numpy as np
import xxhash

from towerd.slots.blob import blob_size
from towerd.slots.errors import StateError
from towerd.slots.layout import CELL_EXT_BYTES, NATIVE, KVLayout, cache_plane, stored_format
from towerd.store.segments.coded_format import CODED_BYTES_MAX, coding_of, is_coded
from towerd.tokens import ID_BYTES, Provenance, Provenances, provenance_as_kept

KEY_BYTES = 32


def key_hash(identity: bytes, scope: str) -> hashlib.blake2b:
    """A hash that gives the key of [0, p1) once it is fed the ids [0, p1) (int32 LE).

    `identity` is a 32-byte digest: the tokenizer's for what the catalog lists, the row identity's
    for files of rows and of states. The scope is length-prefixed, so that no scope and ids
    can pass for others."""
    name = scope.encode()
    h = hashlib.blake2b(identity, digest_size=KEY_BYTES)
    h.update(len(name).to_bytes(4, "little") + name)
    return h


def segment_key(identity: bytes, scope: str, prefix: bytes) -> bytes:
    """BLAKE2b-256(identity, scope, ids[0:p1]); over the whole prefix, so that a split
    changes no key below it."""
    h = key_hash(identity, scope)
    h.update(prefix)
    return h.digest()


RUNS_MAX = 1 << 16
"""Maximum number of runs in a file: each costs a header entry per plane."""


@dataclass(frozen=True, slots=True)
class FormatRun:
    """Rows [row0, row0 + n_rows) of a file, with all planes in `format` where it saves space."""

    row0: int
    n_rows: int
    format: str
    """`native`, a stored format, or a transform coding (`coded_format`)."""
    origin: Provenance = Provenance.EXACT
    """What these rows were computed as: EXACT, DERIVED or AFTER_MOVED; APPROXIMATE for native ones that were
    decoded."""

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.row0 + self.n_rows

    @property
    def is_decoded(self) -> bool:
        """Whether its rows are transform-coded, or native ones that were."""
        return is_coded(self.format) or self.origin == Provenance.APPROXIMATE

    @property
    def provenance(self) -> Provenance:
        """That of each of its rows."""
        return provenance_as_kept(self.origin, is_native=self.format == NATIVE)


WrittenOrigin: TypeAlias = bool | int
"""An origin as files and the catalog have it: false for EXACT, true for DERIVED, as when there were
no others; the number for what came later."""
_ORIGINS = (
    Provenance.EXACT,
    Provenance.DERIVED,
    Provenance.APPROXIMATE,
    Provenance.AFTER_MOVED,
)


def written_origin(origin: Provenance) -> WrittenOrigin:
    """An origin as it is written."""
    return bool(origin) if origin <= Provenance.DERIVED else int(origin)


def read_origin(written: WrittenOrigin) -> Provenance:
    """The inverse. Raises StateError."""
    if written not in _ORIGINS:
        raise StateError(f"rows that were computed as {written} are not known")
    return Provenance(written)


def native_run(n_rows: int) -> tuple[FormatRun, ...]:
    """The single native run of files from before stored formats."""
    return (FormatRun(0, n_rows, NATIVE),)


def check_runs(runs: Sequence[FormatRun], n_rows: int) -> None:
    """Raises StateError unless the runs cover [0, n_rows) consecutively, in known formats."""
    if not 0 < len(runs) <= RUNS_MAX:
        raise StateError(f"{len(runs)} runs; expected 1 to {RUNS_MAX}")
    at = 0
    for run in runs:
        if run.row0 != at or run.n_rows <= 0:
            raise StateError("the runs of rows do not follow one another")
        if is_coded(run.format):
            coding_of(run.format)
        elif run.format != NATIVE:
            stored_format(run.format)
        at = run.end
    if at != n_rows:
        raise StateError(f"the runs hold {at} rows, not {n_rows}")


def provenance_of(runs: Iterable[FormatRun], row0: int, row1: int) -> Provenances:
    """The provenance of rows [row0, row1), uint8[row1 - row0]."""
    provenance = np.zeros(row1 - row0, np.uint8)
    for run in runs:
        if run.provenance and run.row0 < row1 and row0 < run.end:
            provenance[max(run.row0 - row0, 0) : run.end - row0] = run.provenance
    return provenance


def worst_of(runs: Iterable[FormatRun], row0: int, row1: int) -> Provenance:
    """The worst provenance of rows [row0, row1)."""
    found = (run.provenance for run in runs if run.row0 < row1 and row0 < run.end)
    return max(found, default=Provenance.EXACT)


def encode_runs(runs: Sequence[FormatRun]) -> str:
    """The catalog's text of a file's runs."""
    table = [(run.n_rows, run.format, written_origin(run.origin)) for run in runs]
    return msgspec.json.encode(table).decode()


_decode_table = msgspec.json.Decoder(list[tuple[int, str, WrittenOrigin]]).decode


def decode_runs(text: str, n_rows: int) -> tuple[FormatRun, ...]:
    """The inverse; an empty text stands for one native run. Raises StateError."""
    if not text:
        return native_run(n_rows)
    runs: list[FormatRun] = []
    try:
        for n, name, written in _decode_table(text):
            at = runs[-1].end if runs else 0
            runs.append(FormatRun(at, n, name, read_origin(written)))
    except msgspec.MsgspecError as error:
        raise StateError(f"the list of runs cannot be read: {error}") from error
    check_runs(runs, n_rows)
    return tuple(runs)


MAGIC = b"TWRSEG"
VERSION = 3
PAGE = 4096
PREAMBLE = struct.Struct("<6sHII16s")
PREFIX_BYTES = 16
CHECKSUM_BYTES = 16
SPAN_BYTES = 1 << 23
"""Bytes covered by one checksum of a blob, so that two cores can check one blob."""
HEADER_BYTES_MAX = 1 << 28
POSITION_MAX = (1 << 31) - 1

FrameKind: TypeAlias = Literal["k", "v", "ext"]
Shape: TypeAlias = tuple[FrameKind, int, int, int, str]
"""(kind, layer, native ggml type, bytes of a row as stored, format)."""
Span: TypeAlias = tuple[int, int, bytes]
"""(offset, bytes, their checksum)."""


class PlaneEntry(msgspec.Struct, frozen=True, array_like=True):
    """One plane of one run: `nbytes` bytes at `offset`, rows of `row_bytes`, token-major."""

    kind: FrameKind
    layer: int
    ggml_type: int
    """The context's type for these rows; -1 for the cell extension (int32 x, y, token id)."""
    row_bytes: int
    format: str
    """`native` (as the context has them) or a stored format."""
    offset: int
    nbytes: int
    checksum: bytes

    @property
    def shape(self) -> Shape:
        """The plane's entry in `plane_shapes`."""
        return self.kind, self.layer, self.ggml_type, self.row_bytes, self.format

    @property
    def spans(self) -> list[Span]:
        """The spans to check."""
        return [(self.offset, self.nbytes, self.checksum)]


class BlobEntry(msgspec.Struct, frozen=True, array_like=True):
    """The next `n_rows` rows of a native run: a sequence blob of a unified cache."""

    n_rows: int
    offset: int
    nbytes: int
    checksums: bytes
    """The checksums of every SPAN_BYTES, concatenated."""

    @property
    def spans(self) -> list[Span]:
        """The spans to check."""
        sums = [
            self.checksums[at : at + CHECKSUM_BYTES]
            for at in range(0, len(self.checksums), CHECKSUM_BYTES)
        ]
        return [
            (self.offset + i * SPAN_BYTES, min(SPAN_BYTES, self.nbytes - i * SPAN_BYTES), each)
            for i, each in enumerate(sums)
        ]


class CodedEntry(msgspec.Struct, frozen=True, array_like=True):
    """The next `n_rows` rows of a transform-coded run: coded rows (`towerd.codec.rows.coded`), whose head and
    pages have checksums of their own."""

    n_rows: int
    offset: int
    nbytes: int


class RunEntry(msgspec.Struct, frozen=True, array_like=True):
    """Rows [row0, row0 + n_rows) of the file and the planes, blobs or coded rows that hold them."""

    row0: int
    n_rows: int
    format: str
    origin: WrittenOrigin
    planes: list[PlaneEntry]
    blobs: list[BlobEntry] = []
    coded: list[CodedEntry] = []

    @property
    def run(self) -> FormatRun:
        """The run without what holds its rows. Raises StateError."""
        return FormatRun(self.row0, self.n_rows, self.format, read_origin(self.origin))


class HeadEntry(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a head that drafts, beside those of the model: native, in planes. They need not be of all
    positions, and nothing but drafts is lost with them."""

    digest: bytes
    """Names the head."""
    ranges: list[tuple[int, int]]
    """(first row of the file, rows) of what they are of, ascending."""
    planes: list[PlaneEntry]
    """K and V of each of its layers, then the cell extension if it has one."""
    lag: int = 0
    """See `HeadRows`."""

    @property
    def n(self) -> int:
        """Rows of all ranges."""
        return sum(n for _, n in self.ranges)

    @property
    def layout(self) -> KVLayout:
        """Of the head's own rows. Raises StateError for planes that make none."""
        k, v = (
            tuple(cache_plane(p.ggml_type, p.row_bytes) for p in self.planes if p.kind == kind)
            for kind in ("k", "v")
        )
        layout = KVLayout(k, v, any(plane.kind == "ext" for plane in self.planes))
        if [plane.shape for plane in self.planes] != plane_shapes(layout):
            raise StateError("the planes of a head are not in order")
        return layout


class SegmentHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The header of a segment file."""

    row_identity: bytes = msgspec.field(name="fingerprint")
    key: bytes
    """Key of the prefix that ends at p1."""
    scope: str
    p0: int
    p1: int
    ids: bytes
    """int32 LE, p1 - p0 of them."""
    runs: list[RunEntry]
    head: HeadEntry | None = None

    @property
    def n(self) -> int:
        """Rows of all runs."""
        return self.p1 - self.p0

    @property
    def pieces(self) -> list[PlaneEntry | BlobEntry]:
        """The planes and blobs of all runs, each with its checksum; not those of a head, nor coded rows."""
        pieces: list[PlaneEntry | BlobEntry] = []
        for run in self.runs:
            pieces += [*run.planes, *run.blobs]
        return pieces

    @property
    def run_table(self) -> tuple[FormatRun, ...]:
        """The runs without their planes."""
        return tuple(entry.run for entry in self.runs)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SegmentHeader).decode


def page_up(n_bytes: int) -> int:
    """`n_bytes` rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def checksum(*parts: bytes | memoryview) -> bytes:
    """xxh3_128 over the parts, 16 bytes."""
    h = xxhash.xxh3_128()
    for part in parts:
        h.update(part)
    return h.digest()


def plane_shapes(native: KVLayout, format: str = NATIVE) -> list[Shape]:
    """Every plane of a run in this format, in file order: K, V, extension. Planes that the format
    would not make smaller stay native. Raises StateError for an unknown format."""
    stored = native.stored_as(format)
    pairs = list(zip(native.planes, stored.planes, strict=True))
    shapes: list[Shape] = []
    for i, (plane, kept) in enumerate(pairs):
        kind, layer = ("k", i) if i < native.n_layer else ("v", i - native.n_layer)
        name = NATIVE if kept == plane else format
        shapes.append((cast(FrameKind, kind), layer, plane.ggml_type, kept.row_bytes, name))
    if native.cell_ext:
        shapes.append(("ext", 0, -1, CELL_EXT_BYTES, NATIVE))
    return shapes


def encode_head(header: SegmentHeader) -> bytes:
    """Preamble, header and padding: the file's bytes before the data."""
    return framed(MAGIC, VERSION, _encode(header))


def framed(magic: bytes, version: int, body: bytes) -> bytes:
    """A header of a file after its preamble, padded to whole pages."""
    prefix = PREAMBLE.pack(magic, version, len(body), 0, bytes(CHECKSUM_BYTES))[:PREFIX_BYTES]
    head = prefix + checksum(prefix, body) + body
    return head.ljust(page_up(len(head)), b"\0")


def unframed(data: memoryview, magic: bytes, version: int, what: str) -> tuple[memoryview, int]:
    """The header that `framed` put before the data of a file, and where the data begin. Raises
    StateError, which calls the file a `what` file, unless magic, version and checksum are right."""
    if len(data) < PREAMBLE.size:
        raise StateError(f"a {what} file of {len(data)} bytes is too short")
    found, of_version, n_header, zero, expected = PREAMBLE.unpack_from(data)
    if found != magic:
        raise StateError(f"not a {what} file (wrong magic)")
    if of_version != version or zero != 0:
        raise StateError(f"{what} file version {of_version}; this build reads {version}")
    end = PREAMBLE.size + n_header
    if n_header > HEADER_BYTES_MAX or end > len(data):
        raise StateError("the header reaches beyond the file")
    body = data[PREAMBLE.size : end]
    if checksum(data[:PREFIX_BYTES], body) != expected:
        raise StateError("the header's checksum does not match")
    return body, page_up(end)


def decode_head(data: memoryview) -> tuple[SegmentHeader, int]:
    """The header of a whole mapped file and the offset of its data.

    Raises StateError unless checksum, version and every bound hold; never allocates more than
    the file justifies."""
    body, start = unframed(data, MAGIC, VERSION, "segment")
    try:
        header = _decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"the header cannot be read: {error}") from error
    _check(header, len(data) - start)
    return header, start


def check_layout(header: SegmentHeader, native: KVLayout) -> None:
    """Raises StateError unless every run's planes or blobs have this layout in the run's format."""
    for run in header.runs:
        if is_coded(run.format):
            is_right = True  # whoever decodes them checks their basis
        elif run.blobs:
            is_right = run.format == NATIVE and all(
                blob.nbytes == blob_size(native, blob.n_rows) for blob in run.blobs
            )
        else:
            is_right = [plane.shape for plane in run.planes] == plane_shapes(native, run.format)
        if not is_right:
            raise StateError("the layer table is not this model's")


def _check(header: SegmentHeader, n_data: int) -> None:
    if not 0 <= header.p0 < header.p1 <= POSITION_MAX:
        raise StateError(f"positions [{header.p0}, {header.p1}) make no segment")
    if len(header.ids) != header.n * ID_BYTES:
        raise StateError("the number of ids and of positions differ")
    if len(header.row_identity) != KEY_BYTES or len(header.key) != KEY_BYTES:
        raise StateError("row identity and key must have 32 bytes")
    check_runs(header.run_table, header.n)
    for run in header.runs:
        for plane in run.planes:
            if plane.row_bytes <= 0 or plane.nbytes != run.n_rows * plane.row_bytes:
                raise StateError(f"{plane.kind} plane {plane.layer} has a wrong size")
        if run.blobs and (run.planes or [blob.n_rows for blob in run.blobs if blob.n_rows <= 0]):
            raise StateError("a run is kept in two ways, or a blob of it has no rows")
        if run.blobs and sum(blob.n_rows for blob in run.blobs) != run.n_rows:
            raise StateError("the blobs do not hold the rows of their run")
        _check_coded(run, n_data)
    for piece in header.pieces:
        _check_extent(piece, n_data)
    if header.head is not None:
        _check_head(header.head, header.n, n_data)


def _check_coded(run: RunEntry, n_data: int) -> None:
    if is_coded(run.format) != bool(run.coded) or (run.coded and (run.planes or run.blobs)):
        raise StateError("a run is kept in another way than its format says")
    if run.coded and sum(entry.n_rows for entry in run.coded) != run.n_rows:
        raise StateError("the coded rows are not those of their run")
    for entry in run.coded:
        end = n_data - entry.offset
        if (
            entry.n_rows <= 0
            or entry.offset < 0
            or not 0 < entry.nbytes <= min(end, CODED_BYTES_MAX)
        ):
            raise StateError("rows reach beyond the file")


def _check_head(head: HeadEntry, n_rows: int, n_data: int) -> None:
    end = 0
    for row0, n in head.ranges:
        if not end <= row0 < row0 + n <= n_rows:
            raise StateError("the rows of a head are of positions that the file does not have")
        end = row0 + n
    is_named = len(head.digest) == KEY_BYTES and 0 <= head.lag <= n_rows
    if not is_named or not head.ranges or not head.layout.n_layer:
        raise StateError("a head without a name or rows")
    for plane in head.planes:
        if plane.nbytes != head.n * plane.row_bytes:
            raise StateError("a plane of a head has a wrong size")
        _check_extent(plane, n_data)


def _check_extent(piece: PlaneEntry | BlobEntry, n_data: int) -> None:
    if piece.offset < 0 or piece.offset % PAGE or not 0 < piece.nbytes <= n_data - piece.offset:
        raise StateError("rows reach beyond the file")
    if isinstance(piece, BlobEntry):
        n_sums, n_bytes = -(-piece.nbytes // SPAN_BYTES), len(piece.checksums)
    else:
        n_sums, n_bytes = 1, len(piece.checksum)
    if n_bytes != n_sums * CHECKSUM_BYTES:
        raise StateError("a checksum must have 16 bytes")
