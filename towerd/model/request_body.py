"""The body of a request as `towerd.wire` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

KEPT_FIELDS = ("retention", "live_budget", "lora")
"""Fields of a body that towerd reads itself."""


def encode(body: Mapping[str, Any]) -> bytes:
    """A request body as JSON; arrays of token ids become lists."""
    return msgspec.json.encode(body, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
