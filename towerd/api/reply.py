"""JSON replies and errors, in llama-server's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from towerd.errors import (
    DiskFull,
    Forbidden,
    InvalidRequest,
    NotFound,
    StoreError,
    TowerdError,
    Unauthorized,
    Unavailable,
)

JSON_TYPE = "application/json; charset=utf-8"

_encoder = msgspec.json.Encoder()


class PayloadTooLarge(InvalidRequest):
    """The body exceeds `request_bytes_max` (413)."""

    status = 413


class RequestTimeout(InvalidRequest):
    """The body stopped arriving (408)."""

    status = 408


class MethodNotAllowed(InvalidRequest):
    """The route exists, the method does not (405)."""

    status = 405


_BY_STATUS: dict[int, type[TowerdError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    408: RequestTimeout,
    413: PayloadTooLarge,
    503: Unavailable,
    507: DiskFull,
}


def encode(value: Any) -> bytes:
    """Compact JSON; strings stay UTF-8."""
    return _encoder.encode(value)


def json_reply(
    value: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A JSON response with llama-server's content type."""
    reply = web.Response(body=encode(value), status=status, headers=headers)
    reply.headers["Content-Type"] = JSON_TYPE
    return reply


def error_reply(error: TowerdError, headers: dict[str, str] | None = None) -> web.Response:
    """`{"error": {"code", "message", "type"}}` with the error's status."""
    return json_reply(error.body(), status=error.status, headers=headers)


def from_http(error: web.HTTPException) -> TowerdError:
    """aiohttp's own refusals (unknown route, wrong method, bad request line) as ours."""
    if error.status == 404:
        return NotFound("File Not Found")
    kind = _BY_STATUS.get(error.status)
    if kind is None:
        kind = InvalidRequest if error.status < 500 else StoreError
    return kind(error.reason or "Bad request")
