"""Typed access to the fields of a request body and of its query, with errors that name the field.

As in llama-server, null is the same as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from towerd.errors import InvalidRequest

INT32_MAX = 2**31 - 1

Body = Mapping[str, Any]


def json_type(value: Any) -> str:
    """The JSON name of a decoded value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def wrong_type(name: str, expected: str, value: Any) -> InvalidRequest:
    """The error for a value of the wrong type."""
    return InvalidRequest(f"Field '{name}': type must be {expected}, but is {json_type(value)}")


def present(body: Body, *names: str) -> str | None:
    """The first of `names` that has a value."""
    return next((name for name in names if body.get(name) is not None), None)


def boolean(body: Body, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "boolean", value)
    return value


def string(body: Body, name: str, default: str) -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong_type(name, "string", value)
    return value


def number(name: str, value: Any) -> float:
    """`value` as a float. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "number", value)
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(f"Field '{name}': the number is too large") from None


def integer(name: str, value: Any) -> int:
    """`value` as an int; 3.0 is one, 3.5 is not. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "number", value)
    if isinstance(value, float) and not value.is_integer():
        raise InvalidRequest(f"Field '{name}': must be an integer, but got {value}")
    return int(value)


def integer_in(body: Body, names: tuple[str, ...], default: int, low: int, high: int) -> int:
    """The first present of `names`, within [low, high]. Raises InvalidRequest."""
    name = present(body, *names)
    if name is None:
        return default
    value = integer(name, body[name])
    check_range(name, value, low, high)
    return value


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest in llama-server's words when `value` is outside [low, high]."""
    if not low <= value <= high:
        raise InvalidRequest(
            f"Field '{name}': Value must be between {low} <= value <= {high}, but got {value}"
        )


def integer_query(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """`?name=` within [low, high]. Raises InvalidRequest."""
    raw = request.query.get(name)
    if raw is None:
        return default
    try:
        value = int(raw)
    except ValueError:
        raise InvalidRequest(f"Query parameter '{name}' must be an integer") from None
    check_range(name, value, low, high)
    return value


def flag(request: web.Request, name: str) -> bool:
    """Whether `?name` is set and not 0 or false."""
    return request.query.get(name, "0").lower() not in ("0", "false")
