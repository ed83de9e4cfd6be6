"""Typed access to the query string."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http import fields
from towerd.errors import InvalidRequest, NotFound


def integer_query(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """`?name=` within [low, high]. Raises InvalidRequest."""
    raw = request.query.get(name)
    if raw is None:
        return default
    try:
        value = int(raw)
    except ValueError:
        raise InvalidRequest(f"Query parameter '{name}' must be an integer") from None
    fields.check_range(name, value, low, high)
    return value


def flag(request: web.Request, name: str) -> bool:
    """Whether `?name` is set and not 0 or false."""
    return request.query.get(name, "0").lower() not in ("0", "false")


def segment_id(request: web.Request) -> int:
    """The segment id in the request's path. Raises NotFound."""
    raw = request.match_info["id"]
    if not raw.isdecimal() or len(raw) > 18:
        raise NotFound(f"there is no segment {raw[:50]!r}")
    return int(raw)
