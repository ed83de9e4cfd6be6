"""JSON replies, and errors in the shape of the API that was asked: its path says which.

A program acts upon some errors by their type or their words: it compacts a conversation that is too long, or
asks for a key. So an error has the words that programs of that API look for, beside llama-server's own where
the API leaves room for them.
"""

from __future__ import annotations

import enum
import logging
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong

from towerd.errors import (
    ContextExceeded,
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
    body = _shaped(_api_of(path), error.body(in_full=in_full)["error"])
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)} | (headers or {})
    return json_reply(body, status=error.status, headers=headers)


def error_event(path: str, error: TowerdError, *, in_full: bool = False) -> bytes:
    """The same as an event, for a stream that has begun. Details that clients must not see are
    logged."""
    if error.public != error.message:
        log.warning("request failed: %s", error.message)
    api = _api_of(path)
    return _event(api, _shaped(api, error.body(in_full=in_full)["error"]))


def event_of_reply(path: str, body: bytes) -> bytes:
    """The event for the body of an error reply that another towerd made for this path."""
    said = error_body(body)
    return b"data: %s\n\n" % body if said is None else _event(_api_of(path), said)


def reshaped(path: str, body: bytes) -> bytes:
    """llama-server's error reply in the shape of the path's API; unchanged if it is none."""
    api, said = _api_of(path), error_body(body)
    if said is None or api is Api.LLAMA:
        return body
    return encode(said | _shaped(api, said["error"]))


def _event(api: Api, body: dict[str, Any]) -> bytes:
    if api is Api.OLLAMA:
        return encode(body) + b"\n"
    name = b"event: error\n" if api in (Api.ANTHROPIC, Api.RESPONSES) else b""
    return b"%sdata: %s\n\n" % (name, encode(_event_fields(api, body)))


def error_body(body: bytes) -> dict[str, Any] | None:
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


# ---- the shapes of errors -----------------------------------------------------------------------

ErrorFields: TypeAlias = dict[str, Any]
"""llama-server's error object: `code` (the status), `message`, `type` and further fields."""


class Api(enum.Enum):
    """Whose API a path belongs to."""

    LLAMA = "llama"
    """llama-server's own endpoints, and towerd's."""
    OPENAI = "openai"
    RESPONSES = "responses"
    """OpenAI's as well, but its streams have another shape."""
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    """Its streams are lines of JSON."""


_PATHS: dict[str, Api] = {
    "/v1/messages": Api.ANTHROPIC,
    "/v1/responses": Api.RESPONSES,
    "/responses": Api.RESPONSES,
    "/v1/conversations": Api.OPENAI,
    "/conversations": Api.OPENAI,
    "/v1/chat/completions": Api.OPENAI,
    "/chat/completions": Api.OPENAI,
    "/v1/completions": Api.OPENAI,
    "/v1/audio/transcriptions": Api.OPENAI,
    "/audio/transcriptions": Api.OPENAI,
    "/api": Api.OLLAMA,
}
_ANTHROPIC_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; others are `invalid_request_error` below 500, `api_error` from there on."""


def _api_of(path: str) -> Api:
    """The API of a path, and of the paths below it."""
    return next(
        (api for base, api in _PATHS.items() if path == base or path.startswith(base + "/")),
        Api.LLAMA,
    )


def _shaped(api: Api, error: ErrorFields) -> dict[str, Any]:
    """The body that says `error` in this API."""
    if api is Api.ANTHROPIC:
        return {"type": "error", "error": _anthropic(error)}
    if api is Api.OLLAMA:
        return {"error": str(error.get("message", ""))}
    return {"error": error if api is Api.LLAMA else _openai(error)}


def _event_fields(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    """What the `data` of an event says in a stream of this API. body: of `shaped`."""
    if api is not Api.RESPONSES:
        return body
    error = body["error"]
    code = error.get("code")
    named = {
        "code": code if isinstance(code, str) else error.get("type"),
        "message": error.get("message"),
    }
    return {"type": "error", **named, "param": None, **body}


def _openai(error: ErrorFields) -> ErrorFields:
    if (sizes := _sizes(error)) is None:
        return error
    n_prompt, n_ctx = sizes
    words = (
        f"This model's maximum context length is {n_ctx} tokens. However, you requested {n_prompt} "
        f"tokens: {error.get('message')}"
    )
    return error | {"code": "context_length_exceeded", "message": words}


def _anthropic(error: ErrorFields) -> dict[str, str]:
    if (sizes := _sizes(error)) is not None:
        n_prompt, n_ctx = sizes
        most = min(n_ctx, n_prompt - 1)  # a prompt of all the context leaves no room for a reply
        words = f"prompt is too long: {n_prompt} tokens > {most} maximum"
        return {"type": "invalid_request_error", "message": words}
    code = error.get("code")
    status = code if isinstance(code, int) else 500
    kind = "invalid_request_error" if status < 500 else "api_error"
    message = str(error.get("message", ""))
    return {"type": _ANTHROPIC_TYPES.get(status, kind), "message": message}


def _sizes(error: ErrorFields) -> tuple[int, int] | None:
    """The tokens of a prompt that is too long, and those of the context; None: it is another error."""
    n_prompt, n_ctx = error.get("n_prompt_tokens"), error.get("n_ctx")
    is_too_long = error.get("type") == ContextExceeded.kind
    if not is_too_long or not isinstance(n_prompt, int) or not isinstance(n_ctx, int):
        return None
    return n_prompt, n_ctx
