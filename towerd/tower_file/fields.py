"""The parts that a `.tower` file consists of: texts, times, flags, compressed bytes."""

from __future__ import annotations

import math
import struct

import zstandard

from towerd.codec import varint
from towerd.codec.varint import VarintReader
from towerd.errors import InvalidRequest

TURNS_MAX = 4096
"""Maximum number of turns; the store's lock is held while they are entered."""
SECONDS_MAX = 1e11
_TIME = struct.Struct("<d")
_UTF8_BYTES = 4
_RATIO_MAX = 256
"""Maximum of bytes that one compressed byte may stand for."""
COMPRESSED_BYTES_MAX = 1 << 26
"""Maximum of the bytes that are compressed as one."""
_LEVEL = 12
_WINDOW_BYTES_MAX = 1 << 23


class TowerFileError(InvalidRequest):
    """The file cannot be read here; the message says what is wrong or missing."""


def contradiction() -> TowerFileError:
    """The error for a file whose checksum is right and whose content cannot be."""
    return TowerFileError(
        "The .tower file is damaged, its parts contradict each other: use another copy of it."
    )


def put_text(text: str) -> bytes:
    """A text: its length and UTF-8."""
    return put_bytes(text.encode())


def read_text(reader: VarintReader, chars_max: int) -> str:
    """A text of at most `chars_max` characters."""
    try:
        text = reader.take(reader.number(chars_max * _UTF8_BYTES + 1)).decode()
    except UnicodeDecodeError:
        raise contradiction() from None
    if len(text) > chars_max:
        raise contradiction()
    return text


def put_bytes(data: bytes) -> bytes:
    """Bytes after their length."""
    return varint.put(len(data)) + data


def read_bytes(reader: VarintReader) -> bytes:
    """The inverse of `put_bytes`."""
    return reader.take(reader.number())


def put_time(unix_s: float) -> bytes:
    """A moment: f64."""
    return _TIME.pack(unix_s)


def read_time(reader: VarintReader) -> float:
    """A moment that can be one."""
    (value,) = _TIME.unpack(reader.take(_TIME.size))
    if not math.isfinite(value) or not 0 <= value <= SECONDS_MAX:
        raise contradiction()
    return float(value)


def read_flag(reader: VarintReader) -> bool:
    """A byte that is 0 or 1."""
    byte = reader.take(1)[0]
    if byte > 1:
        raise contradiction()
    return bool(byte)


def put_compressed(data: bytes) -> bytes:
    """varint: bytes of the data | its zstd frame after its length; or the data itself, if that is
    shorter or the frame would stand for too many bytes. TowerFileError for too much."""
    if len(data) > COMPRESSED_BYTES_MAX:
        raise TowerFileError(
            f"The session has a text of {len(data)} bytes, and a .tower file holds up to "
            f"{COMPRESSED_BYTES_MAX}."
        )
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    if not len(frame) < len(data) <= _RATIO_MAX * len(frame):
        frame = data
    return varint.put(len(data)) + put_bytes(frame)


def read_compressed(reader: VarintReader) -> bytes:
    """The inverse of `put_compressed`; allocates no more than the bytes justify."""
    n_bytes, frame = reader.number(COMPRESSED_BYTES_MAX + 1), read_bytes(reader)
    if n_bytes == len(frame):
        return frame
    if n_bytes > _RATIO_MAX * len(frame):
        raise contradiction()
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(frame) as stream:
            data = stream.read(n_bytes + 1)
    except zstandard.ZstdError as error:
        raise contradiction() from error
    if len(data) != n_bytes:
        raise contradiction()
    return data
