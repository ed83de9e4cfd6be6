"""What carries requests of towerctl: HTTP over a Unix socket, URLs, JSON, and errors in it."""

from __future__ import annotations

import http.client
import json
import socket as sockets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

from towerd.errors import ConfigError, TowerdError

Json: TypeAlias = dict[str, Any]
TIMEOUT_S = 60.0


class RemoteError(TowerdError):
    """An error reply of the daemon; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = sockets.socket(sockets.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def json_of(data: bytes) -> Any:
    """The JSON value; None for what is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def raise_if_error(value: Json, status: int) -> None:
    """Raises RemoteError if a reply of this HTTP status is an error."""
    error = value.get("error")
    if not isinstance(error, dict):
        return
    message = str(error.get("message") or f"status {status}")
    if status == 401:
        message = f"{message}: give the daemon's key with --api-key"
    if status == 503:
        message = f"The daemon cannot answer now ({message}); try again in a moment"
    code = error.get("code")
    raise RemoteError(message, code if isinstance(code, int) and code else status)


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
