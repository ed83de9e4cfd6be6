"""The error of a request that llama.cpp's code refuses."""

from __future__ import annotations

import json

from towerd.errors import TowerdError


class WireError(TowerdError):
    """llama-server's error reply: its status, message and further fields."""

    def __init__(self, error: bytes) -> None:
        """error: the JSON of llama-server's error object."""
        fields = json.loads(error)
        super().__init__(fields.pop("message"))
        self.status = fields.pop("code")
        self.kind = fields.pop("type")
        self.extra = fields
