"""Names and texts as parts of a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from towerd.errors import ConfigError


def part_of_url(text: str) -> str:
    """A name as one component of a URL path. Raises ConfigError: it is not UTF-8."""
    return quote(_utf8(text), safe="")


def query_of(asked: Mapping[str, Any]) -> str:
    """The query of a URL. Raises ConfigError: a value is not UTF-8."""
    return urlencode({key: _utf8(str(value)) for key, value in asked.items()})


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not UTF-8, which all names and texts here are.") from None
