"""Token ids to bits and back: the cold form of a conversation, a few kilobytes (README.md)."""

from __future__ import annotations

from towerd.codec.codec import Codec
from towerd.codec.errors import CodecError

__all__ = ["Codec", "CodecError"]
