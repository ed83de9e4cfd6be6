"""One state checkpoint on disk: a small checksummed header, then the bytes.

    0   magic "TWRBND"
    6   u16  version
    8   u32  header length in bytes
    12  u32  0
    16  xxh3_128 of bytes [0, 16) and the header
    32  header (msgpack), then zeros up to the next page, then the state

A file is named by the key of the prefix whose state it holds, so the same state has one file
however many sessions share it, and a file found on disk says by itself where it belongs.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError
from towerd.store.files.file_map import StoreFiles
from towerd.store.segments.segment_header import PREAMBLE, checksum, framed, unframed

MAGIC = b"TWRBND"
VERSION = 1
CUT_META = "state_cut:"
"""With the row identity's digest behind it: where this model's stored state can be cut."""
ANYWHERE = "anywhere"
FOLDER = "boundaries"
"""The folder of these files in a store."""
SUFFIX = ".twb"
HALF = ".tmp"
"""The suffix of a file that is being written."""
DERIVED = ".derived"
"""Precedes the suffix of a state computed from approximate rows."""

_HEAD_BYTES_MAX = 4096

Bytes = npt.NDArray[np.uint8]


class CheckpointHeader(msgspec.Struct, frozen=True):
    """The header of a checkpoint file."""

    row_identity: bytes = msgspec.field(name="fingerprint")
    key: bytes
    position: int
    derived: bool
    nbytes: int
    checksum: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CheckpointHeader).decode


def file_name(key: bytes, derived: bool) -> str:
    """The file name for a key."""
    return key.hex() + (DERIVED if derived else "") + SUFFIX


def parse_name(name: str) -> tuple[bytes, bool] | None:
    """(key, derived) of a file name; None for a foreign name."""
    if not name.endswith(SUFFIX):
        return None
    stem = name.removesuffix(SUFFIX)
    derived = stem.endswith(DERIVED)
    try:
        key = bytes.fromhex(stem.removesuffix(DERIVED))
    except ValueError:
        return None
    return (key, derived) if len(key) == 32 else None


def new_half() -> str:
    """A random, unique name for a file while it is written."""
    return secrets.token_hex(8) + HALF


def write_checkpoint(
    files: StoreFiles,
    folder: Path,
    half: str,
    row_identity: bytes,
    key: bytes,
    position: int,
    derived: bool,
    state: Bytes,
) -> int:
    """Write the file of `key` durably, or not at all; returns its size on disk. `half`: its name until it
    is complete. Raises OSError."""
    data = np.ascontiguousarray(state).data
    header = CheckpointHeader(row_identity, key, position, derived, len(data), checksum(data))
    head = framed(MAGIC, VERSION, _encode(header))
    n_bytes = len(head) + len(data)
    with files.create(folder / half, folder / file_name(key, derived), n_bytes) as file:
        file.write(memoryview(head), 0)
        file.write(data, len(head))
    return files.disk_size(n_bytes)


def read_checkpoint(
    files: StoreFiles, path: Path, row_identity: bytes, key: bytes, position: int, derived: bool
) -> Bytes:
    """The state, every byte checked. Raises StateError (damaged, or another's) or OSError."""
    header, state = _read(files, path)
    if (header.row_identity, header.key, header.position) != (row_identity, key, position):
        raise StateError("the state is of another prefix or model")
    if header.derived != derived:
        raise StateError("the state is not as exact as the file's name says")
    return state


def row_identity_of(files: StoreFiles, path: Path) -> bytes | None:
    """The digest of the row identity whose state a file says it is; None if its header cannot be
    read. Raises OSError."""
    try:
        head = files.read(path, _HEAD_BYTES_MAX)
        if len(head) < PREAMBLE.size:
            return None
        magic, version, n_header, _, _ = PREAMBLE.unpack_from(head)
        if magic != MAGIC or version != VERSION:
            return None
        return _decode(head[PREAMBLE.size : PREAMBLE.size + n_header]).row_identity
    except (StateError, msgspec.MsgspecError):
        return None


def verify_checkpoint(files: StoreFiles, path: Path) -> None:
    """Check every byte, and that the content matches the file's name. Raises as `read_checkpoint`."""
    header, _ = _read(files, path)
    if parse_name(path.name) != (header.key, header.derived):
        raise StateError("the state is of another prefix than the file's name says")


def _read(files: StoreFiles, path: Path) -> tuple[CheckpointHeader, Bytes]:
    data = np.frombuffer(files.read(path), np.uint8)
    body, start = unframed(data.data, MAGIC, VERSION, "state checkpoint")
    try:
        header = _decode(body)
    except msgspec.MsgspecError as error:
        raise StateError(f"the header cannot be read: {error}") from error
    state = data[start:]
    if len(state) != header.nbytes or checksum(state.data) != header.checksum:
        raise StateError("the state's checksum does not match")
    return header, state
