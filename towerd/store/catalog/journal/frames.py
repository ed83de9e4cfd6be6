"""Frames: the form of records in a journal file, and how they are found again after damage.

     0  4   magic
     4  1   kind
     5  1   0
     6  2   schema version of the catalog that the record belongs to
     8  8   id of the store
    16  8   number of the transaction
    24  4   length of the payload
    28 16   xxh3_128 of the 28 bytes above and the payload
    44      payload

Every frame stands by itself. A reader that meets damage looks for the next magic whose checksum is
right, so one bad byte costs one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import xxhash

MAGIC = b"\xf3TWJ"
_PREFIX = struct.Struct("<4sBBHQQI")
_SUM_BYTES = 16
HEAD_BYTES = _PREFIX.size + _SUM_BYTES


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

    kind: FrameKind
    schema: int
    store: int
    seq: int
    start: int
    end: int

    def payload(self, data: bytes) -> bytes:
        """The frame's payload, cut from the bytes of its file."""
        return data[self.start + HEAD_BYTES : self.end]


def encode_frame(kind: FrameKind, schema: int, store: int, seq: int, payload: bytes) -> bytes:
    """The bytes of one frame."""
    prefix = _PREFIX.pack(MAGIC, kind, 0, schema, store, seq, len(payload))
    return prefix + _checksum(prefix, payload) + payload


def frames(data: bytes) -> Iterator[JournalFrame]:
    """Every frame with a valid checksum, in order. Damage between frames is skipped."""
    view, at = memoryview(data), 0
    while (at := data.find(MAGIC, at)) >= 0:
        frame = _frame_at(view, at)
        if frame is None:
            at += 1
        else:
            yield frame
            at = frame.end


def _frame_at(data: memoryview, start: int) -> JournalFrame | None:
    body = start + HEAD_BYTES
    if body > len(data):
        return None
    prefix = data[start : start + _PREFIX.size]
    _, kind, zero, schema, store, seq, n_bytes = _PREFIX.unpack(prefix)
    if body + n_bytes > len(data):
        return None
    expected = data[start + _PREFIX.size : body]
    if _checksum(prefix, data[body : body + n_bytes]) != expected:
        return None
    if kind not in tuple(FrameKind) or zero != 0:
        return None
    return JournalFrame(FrameKind(kind), schema, store, seq, start, body + n_bytes)


def _checksum(prefix: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    h = xxhash.xxh3_128(prefix)
    h.update(payload)
    return h.digest()
