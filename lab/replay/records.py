"""Reading trace files: lines of JSON, plain or zstd, every field checked."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from lab.replay.trace import TraceError

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LINE_BYTES_MAX = 64 << 20


class TraceRecord:
    """One JSON object of a trace, with typed access to its fields. `where` names it in errors."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise TraceError(f"{where}: expected a JSON object")
        self.value: dict[str, Any] = value
        self.where = where

    def number(self, name: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number of at least `least`; `default` when it is missing or null."""
        found = self.value.get(name)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise TraceError(f"{self.where}: field {name!r} must be a number")
        if not math.isfinite(found) or found < least or found > 2**53:
            raise TraceError(f"{self.where}: field {name!r} is {found}")
        return float(found)

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self.number(name, default, least)
        if value != int(value):
            raise TraceError(f"{self.where}: field {name!r} must be a whole number")
        return int(value)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; `default` when it is missing or null."""
        found = self.value.get(name)
        if found is None and default is not None:
            return default
        if not isinstance(found, str):
            raise TraceError(f"{self.where}: field {name!r} must be text")
        return found

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers that are not negative."""
        found = self.value.get(name)
        if not isinstance(found, list):
            raise TraceError(f"{self.where}: field {name!r} must be a list")
        if not all(type(x) is int and 0 <= x < 2**63 for x in found):
            raise TraceError(f"{self.where}: field {name!r} must hold whole numbers")
        return found

    def records(self, name: str) -> list[TraceRecord]:
        """A list of objects."""
        found = self.value.get(name)
        if not isinstance(found, list):
            raise TraceError(f"{self.where}: field {name!r} must be a list")
        return [TraceRecord(x, f"{self.where}, {name}[{i}]") for i, x in enumerate(found)]


def lines(path: Path) -> Iterator[TraceRecord]:
    """The records of a .jsonl file, without empty lines. Raises TraceError for invalid JSON."""
    with open_text(path) as stream:
        number = 0
        while line := _line(stream, path, number):
            number += 1
            if line.strip():
                yield TraceRecord(_parse(line, f"{path.name}:{number}"), f"{path.name}:{number}")


def document(path: Path) -> TraceRecord:
    """A file that is one JSON object."""
    with open_text(path) as stream:
        try:
            text = stream.read()
        except (OSError, zstandard.ZstdError, UnicodeDecodeError) as error:
            raise TraceError(f"{path.name} cannot be read: {error}") from error
    return TraceRecord(_parse(text, path.name), path.name)


def open_text(path: Path) -> io.TextIOWrapper:
    """A UTF-8 stream over a file that may be zstd-compressed."""
    try:
        raw = path.open("rb")
        is_zstd = raw.read(4) == _ZSTD_MAGIC
        raw.seek(0)
    except OSError as error:
        raise TraceError(f"{path} cannot be opened: {error.strerror}") from error
    if not is_zstd:
        return io.TextIOWrapper(raw, "utf-8", newline="\n")
    reader = zstandard.ZstdDecompressor().stream_reader(raw, closefd=True)
    return io.TextIOWrapper(io.BufferedReader(reader), "utf-8", newline="\n")


def _line(stream: io.TextIOWrapper, path: Path, number: int) -> str:
    try:
        line = stream.readline(_LINE_BYTES_MAX)
    except (OSError, zstandard.ZstdError, UnicodeDecodeError) as error:
        raise TraceError(f"{path.name}:{number + 1} cannot be read: {error}") from error
    if len(line) == _LINE_BYTES_MAX:
        raise TraceError(f"{path.name}:{number + 1} is too long")
    return line


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is not JSON: {error}") from error
