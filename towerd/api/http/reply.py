"""JSON replies and errors, in llama-server's shapes."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong

from towerd.errors import (
    DiskFull,
    Forbidden,
    InvalidRequest,
    NotFound,
    TooLarge,
    TowerdError,
    Unauthorized,
    Unavailable,
)

log = logging.getLogger(__name__)

JSON_TYPE = "application/json; charset=utf-8"
REASON_CHARS_MAX = 200

_encoder = msgspec.json.Encoder()


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
    413: TooLarge,
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


def raw_reply(body: bytes) -> web.Response:
    """A reply whose body is encoded JSON."""
    reply = web.Response(body=body)
    reply.headers["Content-Type"] = JSON_TYPE
    return reply


def error_reply(
    error: TowerdError, headers: dict[str, str] | None = None, *, in_full: bool = False
) -> web.Response:
    """`{"error": {"code", "message", "type"}}` with the error's status."""
    return json_reply(error.body(in_full=in_full), status=error.status, headers=headers)


def error_event(error: TowerdError, *, in_full: bool = False) -> dict[str, Any]:
    """The same body for a stream that has begun. Details that clients must not see are logged."""
    if error.public != error.message:
        log.warning("request failed: %s", error.message)
    return error.body(in_full=in_full)


def from_http(error: web.HTTPException) -> TowerdError:
    """Convert aiohttp's own errors (unknown route, wrong method, bad request line)."""
    if error.status == 404:
        return NotFound("File Not Found")
    kind = _BY_STATUS.get(error.status)
    if kind is None:
        kind = InvalidRequest if error.status < 500 else TowerdError
    return kind(error.reason or "Bad request")


def reason_of(error: HttpProcessingError) -> str:
    """The message of aiohttp's parser, without the offending bytes."""
    if isinstance(error, LineTooLong):
        return f"a line of its head has more than {error.args[1]} bytes"
    if isinstance(error, InvalidURLError):
        return "its URL is invalid"
    said = " ".join(error.message.partition("\n\n")[0].split())
    return said.rstrip(":.")[:REASON_CHARS_MAX]
