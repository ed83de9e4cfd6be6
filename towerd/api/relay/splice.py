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

_SLOT = re.compile(rb'(?<=[{,])"id_slot":(-?\d+)')
_SLOT_BYTES_MAX = 32
_SPACE = b" \t\r\n"
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


class SlotHider:
    """Replaces each `id_slot` of a reply that arrives in parts by 0, in as many bytes, so that the
    reply's length stays."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """What can be sent of the bytes so far: all but an end that may be half an `id_slot`."""
        data = self._held + chunk
        cut = len(data)
        if not data.endswith(b"\n"):  # at the end of an event there is nothing to wait for
            start = max(data.rfind(b","), data.rfind(b"{"))
            cut = start if 0 <= start and cut - start <= _SLOT_BYTES_MAX else cut
        self._held = data[cut:]
        return _SLOT.sub(_zero, data[:cut])

    def rest(self) -> bytes:
        """The end of the reply."""
        held, self._held = self._held, b""
        return _SLOT.sub(_zero, held)


def _zero(found: re.Match[bytes]) -> bytes:
    return b'"id_slot":' + b"0".rjust(len(found[1]))
