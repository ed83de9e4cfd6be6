"""Decoding JSON that clients send, which is not always quite JSON: see `towerd.wire.mended_json`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_json(data: bytes, type: Any = Any) -> Any:
    """The value of a text of JSON. Raises as msgspec's decoder."""
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not may_be_mended(data):
            raise
    from towerd.wire import mended_json  # llama.cpp's libraries are loaded for that

    return msgspec.json.decode(mended_json(data), type=type)


def may_be_mended(data: bytes) -> bool:
    """Whether a text may begin with a byte-order mark or hold half of a surrogate pair."""
    return data.startswith(_MARK) or _SURROGATE.search(data) is not None
