"""Setting fields of a JSON object without touching the rest of its bytes.

A request goes on as the client wrote it: numbers keep their digits, unknown fields their order.
llama-server, like every common JSON reader, takes the last of two equal keys, so what towerd
decides is appended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_SPACE = b" \t\r\n"
_TOKENS = re.compile(rb'(?<=[{,])"tokens":\[[\d,]*\]')
_encoder = msgspec.json.Encoder()


def with_fields(document: bytes, fields: Mapping[str, Any]) -> bytes:
    """`document`, the text of a JSON object, with `fields` set, whatever it had under these
    names. Raises ValueError if it does not end as an object does."""
    body = document.strip(_SPACE)
    if not body.endswith(b"}"):
        raise ValueError("not a JSON object")
    head = body[:-1].rstrip(_SPACE)
    if not fields:
        return body
    comma = b"" if head == b"{" else b","
    return head + comma + _encoder.encode(dict(fields))[1:]


def without_token_ids(document: bytes) -> bytes:
    """A /completion reply with an empty `tokens`, as the client has it that did not ask for ids.

    An unescaped quote cannot stand inside a JSON text, so the first match is the key itself."""
    return _TOKENS.sub(b'"tokens":[]', document, count=1)
