"""Errors that reach users: one class per HTTP status, with llama-server's `type` word.

Raise these anywhere below the API; `towerd.api` turns them into llama-server's error shape
(`{"error": {"code", "message", "type"}}`) and the CLI into one sentence.
"""

from __future__ import annotations

import json
import logging
from typing import Any

log = logging.getLogger(__name__)


class TowerdError(Exception):
    """Base of every expected failure; `message` is one sentence that says what to do.

    The message is for the operator: the log and the command line show it. Clients get `public`,
    which never names files of the operator."""

    status = 500
    kind = "server_error"
    stands_for = ""
    """What clients get instead of the message; empty: the message, which names no files."""
    retry_after_s: int | None = None
    """Seconds after which a client may try again, as `Retry-After` says it; None: it is not said."""

    def __init__(self, message: str, *, public: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.public = public or self.stands_for or message
        self.extra = extra

    def body(self, *, in_full: bool = False) -> dict[str, Any]:
        """The JSON body llama-server would send for this error. in_full: for the operator."""
        message = self.message if in_full else self.public
        error = {"code": self.status, "message": message, "type": self.kind}
        return {"error": error | self.extra}


class InvalidRequest(TowerdError):
    """The request itself is wrong (400)."""

    status = 400
    kind = "invalid_request_error"


class TooLarge(InvalidRequest):
    """The request, or a text in it, has more bytes than are taken at once (413)."""

    status = 413


class ContextExceeded(InvalidRequest):
    """The prompt does not fit the context (400, with `n_prompt_tokens` and `n_ctx`)."""

    kind = "exceed_context_size_error"

    @classmethod
    def of_request(
        cls, n_prompt_tokens: int, n_ctx: int, *, is_least: bool = False
    ) -> ContextExceeded:
        """The error of a prompt, as llama-server words it. is_least: the prompt may have more
        tokens, since it was not tokenized."""
        least = "at least " if is_least else ""
        return cls(
            f"request ({least}{n_prompt_tokens} tokens) exceeds the available context size "
            f"({n_ctx} tokens), try increasing it",
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=n_ctx,
        )


class Unauthorized(TowerdError):
    """A key is missing or wrong (401)."""

    status = 401
    kind = "authentication_error"


class Forbidden(TowerdError):
    """The caller is known but may not do this (403)."""

    status = 403
    kind = "permission_error"


class FeatureDisabled(Forbidden):
    """A feature of llama-server that is off, as it is there by default (403)."""

    kind = "feature_disabled"


class NotFound(TowerdError):
    """No such route, model, session or segment (404)."""

    status = 404
    kind = "not_found_error"


class NotSupported(TowerdError):
    """This engine or model cannot do it (400, which clients do not retry); the message says which
    can."""

    status = 400
    kind = "not_supported_error"


class SwitchedOff(NotSupported):
    """An endpoint for observers that is disabled (501, as in llama-server: no client of a chat asks for it,
    so that none retries it)."""

    status = 501


class Unavailable(TowerdError):
    """The daemon is loading, shutting down, or its queue is full (503)."""

    status = 503
    kind = "unavailable_error"


class RamLimitReached(Unavailable):
    """What towerd may have of the RAM is taken (503): the same request may be answered in a while."""

    retry_after_s = 5


class RequestTooBig(TooLarge):
    """The request alone takes more RAM than towerd may have beside its model (413)."""


class ModelError(TowerdError):
    """The GGUF cannot be served: truncated, not a GGUF, or of an unsupported architecture."""


class StoreError(TowerdError):
    """The store cannot be opened, read or written."""

    stands_for = "The store failed: the daemon's log says how."


class StoreLocked(StoreError):
    """Another daemon owns this store."""


class ServedAlready(StoreLocked):
    """A process of the same daemon serves this model (409)."""

    status = 409
    kind = "conflict_error"
    stands_for = ""


class StoreVersion(StoreError):
    """The store was written by an incompatible version."""


class DiskFull(StoreError):
    """A write failed for lack of space (507); acknowledged data is intact."""

    status = 507
    kind = "insufficient_storage_error"
    stands_for = "The disk is full: free disk space or lower --warm-bytes."


class DiskLimitReached(DiskFull):
    """What may not leave the disk takes all that the store may have of it (507)."""

    stands_for = (
        "Conversations take all of --disk-max: raise it, or delete some and run towerctl gc."
    )


class RowsDamaged(StoreError):
    """Stored rows failed their check; they are quarantined and their tokens are prefilled."""


class SegmentsGone(StoreError):
    """Segments were removed before their rows could be written; no data is lost."""


class SessionFrozen(StoreError):
    """A session is frozen; thaw it first (409)."""

    status = 409
    kind = "invalid_request_error"
    stands_for = ""


class SessionDeleted(StoreError):
    """A session was deleted while something was on its way into it, which is not recorded (409)."""

    status = 409
    kind = "invalid_request_error"
    stands_for = ""


class TokensLost(StoreError):
    """No readable copy of a session's tokens is left."""

    stands_for = ""


class ThawError(StoreError):
    """A frozen session cannot be decoded here. It stays unchanged; the message names what is
    missing."""

    stands_for = ""


class ConfigError(TowerdError):
    """A setting is unknown, of the wrong type or contradictory; nothing was started."""


class WireError(TowerdError):
    """What llama.cpp's code refuses, with llama-server's error reply: its status, message and further fields. What a model does not support
    is 400 instead of 501: clients repeat requests that end with 500 or more."""

    def __init__(self, error: bytes) -> None:
        """error: the JSON of llama-server's error object."""
        fields = json.loads(error)
        super().__init__(fields.pop("message"))
        status = fields.pop("code")
        self.status = NotSupported.status if status == SwitchedOff.status else status
        self.kind = fields.pop("type")
        self.extra = fields


def unforeseen(error: BaseException, otherwise: str) -> TowerdError:
    """What clients are told of an error that is not ours: memory that could not be had ends one request, which may be
    answered in a while. otherwise: the sentence for any other error"""
    no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if isinstance(error, MemoryError) or no_thread:
        return RamLimitReached(
            "There is no memory for this request now: try again in a few seconds"
        )
    return TowerdError(otherwise)


def refusal(error: BaseException) -> bytes:
    """The error object for what Python code raised that llama.cpp's code called. Any error
    but ours is logged, and clients are told no more than that it happened."""
    if not isinstance(error, TowerdError):
        log.error("a call from llama.cpp's code failed", exc_info=error)
        error = unforeseen(error, "The server failed: its log says how.")
    return json.dumps(error.body()["error"]).encode()
