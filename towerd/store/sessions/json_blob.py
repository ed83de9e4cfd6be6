"""JSON texts as the catalog keeps them: compressed if that pays."""

from __future__ import annotations

import zstandard

PACKED_BYTES_MIN = 512
_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 3


def pack(data: bytes) -> bytes:
    """The bytes to keep of a JSON text."""
    if len(data) < PACKED_BYTES_MIN:
        return data
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def unpack(blob: bytes) -> bytes:
    """The inverse of `pack`. No JSON text begins as a compressed one does."""
    if not blob.startswith(_MAGIC):
        return blob
    return zstandard.ZstdDecompressor().decompress(blob)
