"""What decides how a request of Ollama's API is handled, before its text is read: the model, `stream`, `keep_alive`,
and whether it only loads a model or unloads it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from aiohttp import web

from towerd.api.http.body import decode_json
from towerd.api.http.fields import wrong_type
from towerd.api.http.keys import LIMITS
from towerd.errors import InvalidRequest

LATEST = ":latest"
"""The tag that a name without one has."""
_EMPTY = re.compile(rb"\s*(null|\[\s*\])?\s*")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([-+]?)((?:{_PART})+)")


class OllamaAsked(msgspec.Struct, frozen=True):
    """The fields of a body that say so."""

    model: Any = None
    name: Any = None
    """An older name of `model`."""
    stream: Any = None
    keep_alive: Any = None
    prompt: Any = None
    messages: msgspec.Raw = msgspec.Raw(b"")

    def model_name(self) -> str:
        """The model that is asked for. Raises InvalidRequest if none is."""
        name = self.model or self.name
        if name is None or name == "":
            raise InvalidRequest("model is required")
        if not isinstance(name, str):
            raise wrong_type("model", "string", name)
        return name

    def is_streamed(self) -> bool:
        """Whether the reply is a stream, as it is unless the body says no. Raises InvalidRequest."""
        if self.stream is None:
            return True
        if not isinstance(self.stream, bool):
            raise wrong_type("stream", "boolean", self.stream)
        return self.stream

    def is_empty(self, *, is_chat: bool) -> bool:
        """Whether there is nothing to answer: the request only loads its model, or unloads it."""
        if is_chat:
            return _EMPTY.fullmatch(self.messages) is not None
        return self.prompt is None or self.prompt == ""

    def unloads(self) -> bool:
        """Whether the model is to be unloaded behind the request. Raises InvalidRequest."""
        return self.keep_alive is not None and seconds_of(self.keep_alive) == 0


async def asked_of(request: web.Request, data: bytes) -> OllamaAsked:
    """What a body asks for. Raises InvalidRequest if it is no JSON object."""
    if len(data) <= request.app[LIMITS].inline_bytes_max:
        return _asked(data)
    return await asyncio.to_thread(_asked, data)


def _asked(data: bytes) -> OllamaAsked:
    try:
        asked: OllamaAsked = decode_json(data, OllamaAsked)
        return asked
    except msgspec.ValidationError as error:
        raise InvalidRequest("The request body must be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from error


def seconds_of(keep_alive: Any) -> float:
    """A duration: a number of seconds, or a text as "5m" or "1h30m". Raises InvalidRequest."""
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return float(keep_alive)
    if not isinstance(keep_alive, str):
        raise wrong_type("keep_alive", "number or string", keep_alive)
    if keep_alive == "0":
        return 0.0
    found = _DURATION.fullmatch(keep_alive)
    if found is None:
        raise InvalidRequest(f"Field 'keep_alive': {keep_alive[:40]!r} is no duration, as 5m is")
    total_s = sum(float(n) * _UNIT_S[unit] for n, unit in re.findall(_PART, found[2]))
    return -total_s if found[1] == "-" else total_s


def without_latest(name: str) -> str:
    """A name without the tag that Ollama adds to names that have none."""
    return name.removesuffix(LATEST)
