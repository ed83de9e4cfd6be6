"""Sets fields of a JSON object without changing the rest of its bytes.

A request is forwarded as the client wrote it: numbers keep their digits, unknown fields their
order. llama-server, like every common JSON parser, takes the last of two equal keys, so towerd
appends its own fields.
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
    """`document`, the text of a JSON object, with `fields` set, overriding existing values. Raises
    ValueError if it does not end as an object does."""
    body = document.strip(_SPACE)
    if not body.endswith(b"}"):
        raise ValueError("not a JSON object")
    head = body[:-1].rstrip(_SPACE)
    if not fields:
        return body
    comma = b"" if head == b"{" else b","
    return head + comma + _encoder.encode(dict(fields))[1:]


def without_token_ids(document: bytes) -> bytes:
    """A /completion reply with an empty `tokens`, as for a client that did not ask for ids.

    A JSON string cannot contain an unescaped quote, so the first match is the key itself."""
    return _TOKENS.sub(b'"tokens":[]', document, count=1)
