"""What kind of picture or sound some bytes are, by how they begin."""

from __future__ import annotations

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (8, b"WAVE", "audio/wav"),
    (0, b"ID3", "audio/mpeg"),
    *((0, b"\xff" + bytes([byte]), "audio/mpeg") for byte in (0xFA, 0xFB, 0xF2, 0xF3)),
    (0, b"fLaC", "audio/flac"),
)
"""(offset, bytes there, media type)."""


def media_type_of(data: bytes) -> str | None:
    """The media type; None: it is none of those that are known."""
    return next((kind for at, magic, kind in _MAGIC if data.startswith(magic, at)), None)
