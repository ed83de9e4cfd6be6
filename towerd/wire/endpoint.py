"""The endpoints whose requests `towerd.wire` parses."""

from typing import Literal, TypeAlias

Endpoint: TypeAlias = Literal[
    "completion", "completions", "chat", "responses", "messages", "infill"
]
"""POST /completion, /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /infill."""
