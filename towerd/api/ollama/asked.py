"""What decides how a request of Ollama's API is handled, before its text is read: the model, `stream`, `keep_alive`,
and whether it only loads a model or unloads it."""

from __future__ import annotations

import asyncio
import re
from math import inf
from typing import Any

import msgspec
from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.body import check_values, decode_json
from towerd.api.http.fields import wrong_type
from towerd.api.http.keys import LIMITS
from towerd.api.http.limits import Limits
from towerd.errors import InvalidRequest

LATEST = ":latest"
"""The tag that a name without one has."""
NAME_CHARS_MAX = 1024
"""Of a model: replies repeat its name in every line."""
DURATION_CHARS_MAX = 64
KEEP_ALIVE_S_MAX = 365 * 86400.0
"""Longer is for ever."""
_SHORT_BYTES_MAX = 8192
"""Of a value that is read here, however its characters are escaped."""
_NO_MESSAGES = re.compile(rb"\s*(null|\[\s*\])?\s*")
_NO_PROMPT = re.compile(rb'\s*(null|"")?\s*')
_UNIT_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "\u00b5s": 1e-6,  # the micro sign
    "\u03bcs": 1e-6,  # the Greek letter
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = rf"(\d+(?:\.\d*)?|\.\d+)({'|'.join(_UNIT_S)})"
_DURATION = re.compile(rf"([-+]?)(0|(?:{_PART})+)", re.ASCII)
_PARTS = re.compile(_PART, re.ASCII)


class OllamaAsked(msgspec.Struct, frozen=True):
    """The fields of a body that say so. They are not decoded before they are asked for, and then only short ones:
    whatever else a client puts there costs nothing."""

    model: msgspec.Raw = msgspec.Raw(b"")
    name: msgspec.Raw = msgspec.Raw(b"")
    """An older name of `model`."""
    stream: msgspec.Raw = msgspec.Raw(b"")
    keep_alive: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")

    def model_name(self) -> str:
        """The model that is asked for. Raises InvalidRequest if none is."""
        name = _short("model", self.model) or _short("name", self.name)
        if name is None or name == "":
            raise InvalidRequest("model is required")
        if not isinstance(name, str):
            raise wrong_type("model", "string", name)
        if len(name) > NAME_CHARS_MAX:
            raise _too_long("model")
        return name

    def is_streamed(self) -> bool:
        """Whether the reply is a stream, as it is unless the body says no. Raises InvalidRequest."""
        stream = _short("stream", self.stream)
        if stream is None:
            return True
        if not isinstance(stream, bool):
            raise wrong_type("stream", "boolean", stream)
        return stream

    def is_empty(self, *, is_chat: bool) -> bool:
        """Whether there is nothing to answer: the request only loads its model, or unloads it."""
        if is_chat:
            return _NO_MESSAGES.fullmatch(self.messages) is not None
        return _NO_PROMPT.fullmatch(self.prompt) is not None

    def keep_alive_s(self) -> float | None:
        """Seconds for which the model is to stay loaded behind the request; infinite for ever, None: the request does
        not say. Raises InvalidRequest."""
        keep_alive = _short("keep_alive", self.keep_alive)
        if keep_alive is None:
            return None
        seconds = seconds_of(keep_alive)
        return seconds if 0 <= seconds <= KEEP_ALIVE_S_MAX else inf


async def asked_of(request: web.Request, data: bytes) -> OllamaAsked:
    """What a body asks for. Raises InvalidRequest if it is no JSON object, or has too many values."""
    limits = request.app[LIMITS]
    if len(data) <= limits.inline_bytes_max:
        return _asked(data, limits)
    return await asyncio.to_thread(_asked, data, limits)


def _asked(data: bytes, limits: Limits) -> OllamaAsked:
    check_values(data, limits)
    try:
        asked: OllamaAsked = decode_json(data, OllamaAsked)
        return asked
    except msgspec.ValidationError as error:
        raise InvalidRequest("The request body must be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from error


def _short(name: str, value: msgspec.Raw) -> Any:
    """The value of a field; None: it has none. Raises InvalidRequest for a long one."""
    data = bytes(memoryview(value)[: _SHORT_BYTES_MAX + 1])
    if len(data) > _SHORT_BYTES_MAX:
        raise _too_long(name)
    try:
        return decode_json(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from error


def _too_long(name: str) -> InvalidRequest:
    return InvalidRequest(f"Field '{name}': is too long")


def _not_json(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"The request body is not valid JSON: {error}")


def seconds_of(keep_alive: Any) -> float:
    """A duration: a number of seconds, or a text as "5m" or "1h30m". Raises InvalidRequest."""
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return fields.number("keep_alive", keep_alive)
    if not isinstance(keep_alive, str):
        raise wrong_type("keep_alive", "number or string", keep_alive)
    # The length comes first: what a pattern takes for a long text may grow with its square.
    found = None
    if len(keep_alive) <= DURATION_CHARS_MAX:
        found = _DURATION.fullmatch(keep_alive)
    if found is None:
        raise InvalidRequest(
            f"Field 'keep_alive': {keep_alive[:40]!r} is not a duration such as 5m"
        )
    total_s = sum(float(n) * _UNIT_S[unit] for n, unit in _PARTS.findall(found[2]))
    return -total_s if found[1] == "-" else total_s


def without_latest(name: str) -> str:
    """A name without the tag that Ollama adds to names that have none."""
    return name.removesuffix(LATEST)
