"""The shapes that errors have in OpenAI's and Anthropic's APIs. The path of a request says which it asked.

A program acts upon some errors by their type or their words: it compacts a conversation that is too long, or
asks for a key. So an error has the words that programs of that API look for, beside llama-server's own where
the API leaves room for them.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

from towerd.errors import ContextExceeded

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


TOO_LONG_CODE = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit the context."""
_PATHS: dict[str, Api] = {
    "/v1/messages": Api.ANTHROPIC,
    "/v1/responses": Api.RESPONSES,
    "/responses": Api.RESPONSES,
    "/v1/chat/completions": Api.OPENAI,
    "/chat/completions": Api.OPENAI,
    "/v1/completions": Api.OPENAI,
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


def api_of(path: str) -> Api:
    """The API of a path, and of the paths below it."""
    return next(
        (api for base, api in _PATHS.items() if path == base or path.startswith(base + "/")),
        Api.LLAMA,
    )


def shaped(api: Api, error: ErrorFields) -> dict[str, Any]:
    """The body that says `error` in this API."""
    if api is Api.ANTHROPIC:
        return {"type": "error", "error": _anthropic(error)}
    return {"error": error if api is Api.LLAMA else _openai(error)}


def event_fields(api: Api, body: dict[str, Any]) -> dict[str, Any]:
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


def has_event_name(api: Api) -> bool:
    """Whether the events of this API's streams have names; that of an error is `error`."""
    return api in (Api.ANTHROPIC, Api.RESPONSES)


def _openai(error: ErrorFields) -> ErrorFields:
    if (sizes := _sizes(error)) is None:
        return error
    n_prompt, n_ctx = sizes
    words = (
        f"This model's maximum context length is {n_ctx} tokens. However, you requested {n_prompt} "
        f"tokens: {error.get('message')}"
    )
    return error | {"code": TOO_LONG_CODE, "message": words}


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
