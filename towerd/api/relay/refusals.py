"""llama-server's refusals that the same request will meet again, under a status that clients do not retry."""

from __future__ import annotations

from typing import Any

import msgspec

from towerd.api.http.reply import encode
from towerd.errors import NotSupported

BYTES_MAX = 64 * 1024
"""No error of llama-server is larger."""
_FINAL = (
    "is not supported - hint",
    "does not support",
    "is too large to process",
    "Failed to parse ",
)
"""Parts of the messages that llama-server sends with 500 though they are about the request."""


def may_be_refusal(n_bytes: int | None) -> bool:
    """Whether a reply of this length, None if it is not known, may be an error of llama-server."""
    return n_bytes is not None and n_bytes <= BYTES_MAX


def final_refusal(body: bytes) -> bytes | None:
    """The body to send with status 400 instead of this reply with 500 or more; None: it is a failure, which
    may not repeat itself."""
    reply, error = _read(body)
    message = str(error.get("message", ""))
    if error.get("type") != NotSupported.kind and not any(part in message for part in _FINAL):
        return None
    fields = {"code": NotSupported.status, "type": NotSupported.kind}
    return encode(reply | {"error": error | fields})


def kind_and_message(body: bytes) -> tuple[str, str]:
    """What an error of llama-server says; empty for what is none."""
    _, error = _read(body)
    return str(error.get("type") or ""), str(error.get("message") or "")


def _read(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply, and the error in it; empty for what is none."""
    try:
        reply: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        return reply, msgspec.convert(reply["error"], dict[str, Any])
    except (msgspec.MsgspecError, KeyError):
        return {}, {}
