"""Token ids to bits and back: the cold form of a conversation, a few kilobytes (README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from towerd.codec.errors import CodecError

if TYPE_CHECKING:
    from towerd.codec.codec import Codec

__all__ = ["Codec", "CodecError"]


def __getattr__(name: str) -> Any:
    """`Codec`, imported on first use: a daemon needs no coder while it starts."""
    if name != "Codec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from towerd.codec.codec import Codec

    return Codec
