"""The error of a request that llama.cpp's code refuses."""

from __future__ import annotations

import json
import logging

from towerd.errors import NotSupported, TowerdError

log = logging.getLogger(__name__)

NOT_IMPLEMENTED = 501


class WireError(TowerdError):
    """llama-server's error reply: its status, message and further fields. What a model does not support
    is 400 instead of 501: clients repeat requests that end with 500 or more."""

    def __init__(self, error: bytes) -> None:
        """error: the JSON of llama-server's error object."""
        fields = json.loads(error)
        super().__init__(fields.pop("message"))
        status = fields.pop("code")
        self.status = NotSupported.status if status == NOT_IMPLEMENTED else status
        self.kind = fields.pop("type")
        self.extra = fields


def refusal(error: BaseException) -> bytes:
    """The error object for what Python code raised that llama.cpp's code called. Any error
    but ours is logged, and clients are told no more than that it happened."""
    if not isinstance(error, TowerdError):
        log.error("a call from llama.cpp's code failed", exc_info=error)
        error = TowerdError("The server failed: its log says how.")
    return json.dumps(error.body()["error"]).encode()
