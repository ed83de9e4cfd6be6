"""Frames: what the journal's files consist of.

     0  4   magic
     4  1   kind
     5  1   1 if the payload is sealed (`Vault`), else 0
     6  2   schema version of the catalog that the record belongs to
     8  8   id of the store
    16  8   number of the transaction
    24  4   length of the payload
    28 16   xxh3_128 of the 28 bytes above and the payload
    44      payload; sealed, it belongs to the first 24 bytes

A version of the schema only adds tables, so a chain may be of several versions that are read: where a
rewrite in the newest one failed, the changes since follow an older snapshot.

Every frame stands by itself. A reader that meets damage looks for the next magic whose checksum is
right, so one bad byte costs one frame. In an encrypted store those are readable that are sealed with a key of
the vault, and plain ones until all of the store is encrypted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from towerd.errors import StoreError
from towerd.slots.errors import StateError

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

MAGIC = b"\xf3TWJ"
_PREFIX = struct.Struct("<4sBBHQQI")
_SUM_BYTES = 16
HEAD_BYTES = _PREFIX.size + _SUM_BYTES
_ABOUT_BYTES = 24
_SEALED = 1
_PURPOSE = "journal"
"""Of the key that frames are sealed with."""


class FrameKind(IntEnum):
    """The content type of a frame."""

    ROWS = 1
    """Rows of a snapshot."""
    WHOLE = 2
    """The end of a snapshot, with its number of frames."""
    CHANGE = 3
    """The changes of one transaction."""


@dataclass(frozen=True, slots=True)
class JournalFrame:
    """One record; `start` and `end` are its offsets in the file."""

    path: Path
    kind: FrameKind
    schema: int
    store: int
    seq: int
    start: int
    end: int
    is_sealed: bool = False
    is_readable: bool = True
    """It is this store's, which has the key."""

    def payload(self, data: bytes, vault: Vault | None = None) -> bytes:
        """The frame's payload, cut from the bytes of its file. Raises StateError if it cannot be unsealed."""
        found = data[self.start + HEAD_BYTES : self.end]
        if not self.is_sealed:
            return found
        assert vault is not None
        return vault.unseal(_PURPOSE, found, data[self.start : self.start + _ABOUT_BYTES])


def encode_frame(
    kind: FrameKind, schema: int, store: int, seq: int, payload: bytes, vault: Vault | None = None
) -> bytes:
    """The bytes of one frame, sealed if there is a vault."""
    facts = MAGIC, kind, 0 if vault is None else _SEALED, schema, store, seq
    if vault is not None:
        payload = vault.seal(_PURPOSE, payload, _PREFIX.pack(*facts, 0)[:_ABOUT_BYTES])
    prefix = _PREFIX.pack(*facts, len(payload))
    return prefix + _frame_checksum(prefix, payload) + payload


def frames(path: Path, data: bytes, vault: Vault | None = None) -> Iterator[JournalFrame]:
    """Every frame with a right checksum in the bytes of a file, in order. Damage between frames is skipped. Raises
    StoreError if they are sealed and there is no vault."""
    view, at = memoryview(data), 0
    while (at := data.find(MAGIC, at)) >= 0:
        frame = _frame_at(path, view, at)
        if frame is None:
            at += 1
            continue
        yield frame if _is_readable(frame, view, vault) else replace(frame, is_readable=False)
        at = frame.end


def _frame_at(path: Path, data: memoryview, start: int) -> JournalFrame | None:
    body = start + HEAD_BYTES
    if body > len(data):
        return None
    prefix = data[start : start + _PREFIX.size]
    _, kind, sealed, schema, store, seq, n_bytes = _PREFIX.unpack(prefix)
    if body + n_bytes > len(data):
        return None
    expected = data[start + _PREFIX.size : body]
    if _frame_checksum(prefix, data[body : body + n_bytes]) != expected:
        return None
    if kind not in tuple(FrameKind) or sealed not in (0, _SEALED):
        return None
    end = body + n_bytes
    return JournalFrame(path, FrameKind(kind), schema, store, seq, start, end, sealed == _SEALED)


def _is_readable(frame: JournalFrame, data: memoryview, vault: Vault | None) -> bool:
    """Whether a frame is of this store, and can be read now."""
    if vault is None:
        if frame.is_sealed:
            raise StoreError(
                f"the store {frame.path.parent.parent} is encrypted, and its keys.json and keys.copy are missing: put "
                "copies of them back, or move the store directory away to begin with an empty one"
            )
        return True
    if not frame.is_sealed:
        return vault.is_encrypting
    try:
        about = bytes(data[frame.start : frame.start + _ABOUT_BYTES])
        vault.unseal(_PURPOSE, data[frame.start + HEAD_BYTES : frame.end], about)
    except StateError:
        return False
    return True


def _frame_checksum(prefix: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    h = xxhash.xxh3_128(prefix)
    h.update(payload)
    return h.digest()
