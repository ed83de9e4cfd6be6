"""JSON replies, and errors in the shape of the API that was asked."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong

from towerd.api.http.error_shape import Api, api_of, event_fields, has_event_name, shaped
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
    error: TowerdError,
    headers: dict[str, str] | None = None,
    *,
    path: str = "",
    in_full: bool = False,
) -> web.Response:
    """An error with its status. path: of the request, which says whose shape it has; empty:
    llama-server's, `{"error": {"code", "message", "type"}}`."""
    body = shaped(api_of(path), error.body(in_full=in_full)["error"])
    return json_reply(body, status=error.status, headers=headers)


def error_event(path: str, error: TowerdError, *, in_full: bool = False) -> bytes:
    """The same as an event, for a stream that has begun. Details that clients must not see are
    logged."""
    if error.public != error.message:
        log.warning("request failed: %s", error.message)
    api = api_of(path)
    return _event(api, shaped(api, error.body(in_full=in_full)["error"]))


def event_of_reply(path: str, body: bytes) -> bytes:
    """The event for the body of an error reply that another towerd made for this path."""
    said = _decoded(body)
    return b"data: %s\n\n" % body if said is None else _event(api_of(path), said)


def reshaped(path: str, body: bytes) -> bytes:
    """llama-server's error reply in the shape of the path's API; unchanged if it is none."""
    api, said = api_of(path), _decoded(body)
    if said is None or api is Api.LLAMA:
        return body
    return encode(said | shaped(api, said["error"]))


def reshaped_event(path: str, data: bytes) -> bytes | None:
    """The event for the data of llama-server's error event; None: it is none."""
    said = _decoded(data) or _decoded(b'{"error":%s}' % data)
    if said is None or "message" not in said["error"]:
        return None
    api = api_of(path)
    return _event(api, shaped(api, said["error"]))


def _event(api: Api, body: dict[str, Any]) -> bytes:
    name = b"event: error\n" if has_event_name(api) else b""
    return b"%sdata: %s\n\n" % (name, encode(event_fields(api, body)))


def _decoded(body: bytes) -> dict[str, Any] | None:
    """A JSON object with the object `error`; None: it is not one."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("error"), dict):
        return None
    return said


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
