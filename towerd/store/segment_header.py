"""The head of a segment file: preamble and msgpack header, written and read.

    0   magic "TWRSEG"
    6   u16  version
    8   u32  header length in bytes
    12  u32  0
    16  xxh3_128 of bytes [0, 16) and the header
    32  header (msgpack), then zeros up to the next page
    d   data, d = the first page boundary after the header

Offsets in the header count from d. Version 1 has one run of native rows and lists its planes
in the header itself; it is read, never written. Headers of old files may name boundary states
(`boundaries`) that lie behind the planes; states have files of their own now, and those are
passed over.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias, cast

import msgspec
import xxhash

from towerd.slots.errors import StateError
from towerd.slots.layout import CELL_EXT_BYTES, NATIVE, KVLayout
from towerd.store.keys import KEY_BYTES
from towerd.store.node import ID_BYTES
from towerd.store.run import Run, check_runs

MAGIC = b"TWRSEG"
VERSION = 2
VERSION_NATIVE = 1
PAGE = 4096
PREAMBLE = struct.Struct("<6sHII16s")
PREFIX_BYTES = 16
CHECKSUM_BYTES = 16
HEADER_BYTES_MAX = 1 << 28
POSITION_MAX = (1 << 31) - 1

Kind: TypeAlias = Literal["k", "v", "ext"]
Shape: TypeAlias = tuple[Kind, int, int, int, str]
"""(kind, layer, native ggml type, bytes of a row as stored, format)."""


class PlaneEntry(msgspec.Struct, frozen=True, array_like=True):
    """One plane of one run: `nbytes` bytes at `offset`, rows of `row_bytes`, token-major."""

    kind: Kind
    layer: int
    ggml_type: int
    """The type that the context has these rows in; -1 for the cell extension (int32 x, y,
    token id)."""
    row_bytes: int
    format: str
    """`native`: stored as the context has them; else the stored format."""
    offset: int
    nbytes: int
    checksum: bytes

    @property
    def shape(self) -> Shape:
        """What `plane_shapes` says of it."""
        return self.kind, self.layer, self.ggml_type, self.row_bytes, self.format


class RunEntry(msgspec.Struct, frozen=True, array_like=True):
    """Rows [row0, row0 + n_rows) of the file and the planes that hold them."""

    row0: int
    n_rows: int
    format: str
    derived: bool
    planes: list[PlaneEntry]

    @property
    def run(self) -> Run:
        """Without its planes."""
        return Run(self.row0, self.n_rows, self.format, self.derived)


class Header(msgspec.Struct, frozen=True):
    """What a segment file says about itself."""

    fingerprint: bytes
    key: bytes
    """Key of the prefix that ends at p1."""
    scope: str
    p0: int
    p1: int
    ids: bytes
    """int32 LE, p1 - p0 of them."""
    runs: list[RunEntry]

    @property
    def n(self) -> int:
        """Rows of all runs."""
        return self.p1 - self.p0

    @property
    def planes(self) -> list[PlaneEntry]:
        """The planes of all runs."""
        return [plane for run in self.runs for plane in run.planes]

    @property
    def run_table(self) -> tuple[Run, ...]:
        """The runs without their planes."""
        return tuple(entry.run for entry in self.runs)


class _NativeHeader(msgspec.Struct, frozen=True):
    """The header of version 1."""

    fingerprint: bytes
    key: bytes
    scope: str
    p0: int
    p1: int
    ids: bytes
    planes: list[PlaneEntry]

    def upgraded(self) -> Header:
        run = RunEntry(0, self.p1 - self.p0, NATIVE, False, self.planes)
        return Header(self.fingerprint, self.key, self.scope, self.p0, self.p1, self.ids, [run])


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode
_decode_native = msgspec.msgpack.Decoder(_NativeHeader).decode


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
    """Every plane of a run of that format in file order: K, V, extension. Planes that gain
    nothing by the format stay native. Raises StateError for a name that is no format."""
    stored = native.stored_as(format)
    pairs = list(zip(native.planes, stored.planes, strict=True))
    shapes: list[Shape] = []
    for i, (plane, kept) in enumerate(pairs):
        kind, layer = ("k", i) if i < native.n_layer else ("v", i - native.n_layer)
        name = NATIVE if kept == plane else format
        shapes.append((cast(Kind, kind), layer, plane.ggml_type, kept.row_bytes, name))
    if native.cell_ext:
        shapes.append(("ext", 0, -1, CELL_EXT_BYTES, NATIVE))
    return shapes


def encode_head(header: Header) -> bytes:
    """Preamble, header and padding: the file's bytes before the data."""
    body = _encode(header)
    prefix = PREAMBLE.pack(MAGIC, VERSION, len(body), 0, bytes(CHECKSUM_BYTES))[:PREFIX_BYTES]
    head = prefix + checksum(prefix, body) + body
    return head.ljust(page_up(len(head)), b"\0")


def decode_head(data: memoryview) -> tuple[Header, int]:
    """The header of a whole mapped file and the offset of its data.

    Raises StateError unless checksum, version and every bound hold; never allocates more than
    the file justifies."""
    if len(data) < PREAMBLE.size:
        raise StateError(f"a segment file of {len(data)} bytes is too short")
    magic, version, n_header, zero, expected = PREAMBLE.unpack_from(data)
    if magic != MAGIC:
        raise StateError("not a segment file (wrong magic)")
    if version not in (VERSION_NATIVE, VERSION) or zero != 0:
        raise StateError(f"segment file version {version}; this build reads up to {VERSION}")
    end = PREAMBLE.size + n_header
    if n_header > HEADER_BYTES_MAX or end > len(data):
        raise StateError("the header reaches beyond the file")
    body = data[PREAMBLE.size : end]
    if checksum(data[:PREFIX_BYTES], body) != expected:
        raise StateError("the header's checksum does not match")
    try:
        is_native = version == VERSION_NATIVE
        header = _decode_native(body).upgraded() if is_native else _decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"the header cannot be read: {error}") from error
    _check(header, len(data) - page_up(end))
    return header, page_up(end)


def check_layout(header: Header, native: KVLayout) -> None:
    """StateError unless every run's layer table is this layout's in the run's format."""
    for run in header.runs:
        if [plane.shape for plane in run.planes] != plane_shapes(native, run.format):
            raise StateError("the layer table is not this model's")


def _check(header: Header, n_data: int) -> None:
    if not 0 <= header.p0 < header.p1 <= POSITION_MAX:
        raise StateError(f"positions [{header.p0}, {header.p1}) make no segment")
    if len(header.ids) != header.n * ID_BYTES:
        raise StateError("the number of ids and of positions differ")
    if len(header.fingerprint) != KEY_BYTES or len(header.key) != KEY_BYTES:
        raise StateError("fingerprint and key must have 32 bytes")
    check_runs(header.run_table, header.n)
    for run in header.runs:
        for plane in run.planes:
            if plane.row_bytes <= 0 or plane.nbytes != run.n_rows * plane.row_bytes:
                raise StateError(f"{plane.kind} plane {plane.layer} has a wrong size")
            _check_extent(plane, n_data)


def _check_extent(plane: PlaneEntry, n_data: int) -> None:
    if plane.offset < 0 or plane.offset % PAGE or plane.offset + plane.nbytes > n_data:
        raise StateError("a plane reaches beyond the file")
    if len(plane.checksum) != CHECKSUM_BYTES:
        raise StateError("a checksum must have 16 bytes")
