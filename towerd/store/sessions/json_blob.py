"""JSON texts as the catalog keeps them: compressed if that pays."""

from __future__ import annotations

import threading

import zstandard

PACKED_BYTES_MIN = 512
_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 3


class _JsonPacker(threading.local):
    """What a thread packs and unpacks with: to make one takes longer than to unpack most texts."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _JsonPacker()


def pack(data: bytes) -> bytes:
    """The bytes to keep of a JSON text."""
    return data if len(data) < PACKED_BYTES_MIN else _zstd.compressor.compress(data)


def unpack(blob: bytes) -> bytes:
    """The inverse of `pack`. No JSON text begins as a compressed one does."""
    return _zstd.decompressor.decompress(blob) if blob.startswith(_MAGIC) else blob
