"""The head of a segment file: preamble and msgpack header, written and read.

    0   magic "TWRSEG"
    6   u16  version
    8   u32  header length in bytes
    12  u32  0
    16  xxh3_128 of bytes [0, 16) and the header
    32  header (msgpack), then zeros up to the next page
    d   data, d = the first page boundary after the header

Offsets in the header count from d.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec
import xxhash

from towerd.slots.errors import StateError
from towerd.slots.layout import CELL_EXT_BYTES, KVLayout
from towerd.store.keys import KEY_BYTES
from towerd.store.node import ID_BYTES

MAGIC = b"TWRSEG"
VERSION = 1
PAGE = 4096
PREAMBLE = struct.Struct("<6sHII16s")
PREFIX_BYTES = 16
CHECKSUM_BYTES = 16
HEADER_BYTES_MAX = 1 << 28
POSITION_MAX = (1 << 31) - 1
NATIVE = "native"


class PlaneEntry(msgspec.Struct, frozen=True, array_like=True):
    """One plane: `nbytes` bytes at `offset`, rows of `row_bytes`, token-major."""

    kind: Literal["k", "v", "ext"]
    layer: int
    ggml_type: int
    """The rows' ggml type; -1 for the cell extension (int32 x, y, token id)."""
    row_bytes: int
    format: str
    offset: int
    nbytes: int
    checksum: bytes


class BoundaryEntry(msgspec.Struct, frozen=True, array_like=True):
    """An opaque state that is valid exactly at `position`."""

    position: int
    offset: int
    nbytes: int
    checksum: bytes


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
    planes: list[PlaneEntry]
    boundaries: list[BoundaryEntry]

    @property
    def n(self) -> int:
        """Rows per plane."""
        return self.p1 - self.p0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode


def page_up(n_bytes: int) -> int:
    """`n_bytes` rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def checksum(*parts: bytes | memoryview) -> bytes:
    """xxh3_128 over the parts, 16 bytes."""
    h = xxhash.xxh3_128()
    for part in parts:
        h.update(part)
    return h.digest()


def plane_shapes(layout: KVLayout) -> list[tuple[Literal["k", "v", "ext"], int, int, int]]:
    """(kind, layer, ggml type, row bytes) of every plane in file order."""
    shapes: list[tuple[Literal["k", "v", "ext"], int, int, int]] = []
    shapes += [("k", i, plane.ggml_type, plane.row_bytes) for i, plane in enumerate(layout.k)]
    shapes += [("v", i, plane.ggml_type, plane.row_bytes) for i, plane in enumerate(layout.v)]
    if layout.cell_ext:
        shapes.append(("ext", 0, -1, CELL_EXT_BYTES))
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
    if version != VERSION or zero != 0:
        raise StateError(f"segment file version {version}; this build reads {VERSION}")
    end = PREAMBLE.size + n_header
    if n_header > HEADER_BYTES_MAX or end > len(data):
        raise StateError("the header reaches beyond the file")
    body = data[PREAMBLE.size : end]
    if checksum(data[:PREFIX_BYTES], body) != expected:
        raise StateError("the header's checksum does not match")
    try:
        header = _decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"the header cannot be read: {error}") from error
    _check(header, len(data) - page_up(end))
    return header, page_up(end)


def check_layout(header: Header, layout: KVLayout) -> None:
    """StateError unless the layer table is exactly this layout's, in native format."""
    found = [(plane.kind, plane.layer, plane.ggml_type, plane.row_bytes) for plane in header.planes]
    if found != plane_shapes(layout):
        raise StateError("the layer table is not this model's")
    if any(plane.format != NATIVE for plane in header.planes):
        raise StateError("a plane is stored in a format that this build cannot read")


def _check(header: Header, n_data: int) -> None:
    if not 0 <= header.p0 < header.p1 <= POSITION_MAX:
        raise StateError(f"positions [{header.p0}, {header.p1}) make no segment")
    if len(header.ids) != header.n * ID_BYTES:
        raise StateError("the number of ids and of positions differ")
    if len(header.fingerprint) != KEY_BYTES or len(header.key) != KEY_BYTES:
        raise StateError("fingerprint and key must have 32 bytes")
    for plane in header.planes:
        if plane.row_bytes <= 0 or plane.nbytes != header.n * plane.row_bytes:
            raise StateError(f"{plane.kind} plane {plane.layer} has a wrong size")
        _check_extent(plane.offset, plane.nbytes, plane.checksum, n_data)
    last = header.p0
    for boundary in header.boundaries:
        if not last < boundary.position <= header.p1 or boundary.nbytes < 0:
            raise StateError("boundary states must lie in ascending order inside the segment")
        last = boundary.position
        _check_extent(boundary.offset, boundary.nbytes, boundary.checksum, n_data)


def _check_extent(offset: int, n_bytes: int, expected: bytes, n_data: int) -> None:
    if offset < 0 or offset % PAGE or offset + n_bytes > n_data:
        raise StateError("a plane or boundary state reaches beyond the file")
    if len(expected) != CHECKSUM_BYTES:
        raise StateError("a checksum must have 16 bytes")
