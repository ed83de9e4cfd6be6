"""Documents to read: plain text, meetings of QMSum, key-value pairs of "Lost in the Middle"."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard

from lab.texts.tasks import N_HEX, Fact, pair
from towerd.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

ZST = ".zst"
TEXT_BYTES_MAX = 16 << 20


def read_text(path: Path) -> str:
    """The UTF-8 text of a file, which may be compressed as .zst. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            if path.suffix == ZST:
                with zstandard.ZstdDecompressor().stream_reader(file) as stream:
                    data = stream.read(TEXT_BYTES_MAX)
            else:
                data = file.read(TEXT_BYTES_MAX)
        return data.decode("utf-8", errors="ignore" if len(data) == TEXT_BYTES_MAX else "strict")
    except (OSError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise ConfigError(f"Cannot read the text {path}: {error}.") from error


class _Meeting(msgspec.Struct):
    split: str
    transcript: list[tuple[str, str]]


class _Example(msgspec.Struct):
    ordered_kv_records: list[tuple[str, str]]


def read_meetings(path: Path) -> str:
    """The transcripts of QMSum's test meetings, one line per turn. Raises ConfigError."""
    meetings = [each for each in _records(path, _Meeting) if each.split == "test"]
    if not meetings:
        raise ConfigError(f"{path} holds no test meetings of QMSum.")
    turns = (turn for meeting in meetings for turn in meeting.transcript)
    return "\n".join(f"{speaker}: {said}" for speaker, said in turns)


def read_pairs(path: Path) -> list[Fact]:
    """The key-value pairs of "Lost in the Middle"'s examples, in order. Keys and values are cut to
    their first letters, and repeated keys are left out. Raises ConfigError."""
    found: dict[str, str] = {}
    for example in _records(path, _Example):
        for key, value in example.ordered_kv_records:
            found.setdefault(key[:N_HEX], value[:N_HEX])
    if not found:
        raise ConfigError(f"{path} holds no key-value examples.")
    return [pair(key, value) for key, value in found.items()]


def _records(path: Path, kind: type[T]) -> list[T]:
    decoder = msgspec.json.Decoder(kind)
    try:
        return [decoder.decode(line) for line in read_text(path).split("\n") if line.strip()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not the data set that is needed: {error}.") from error
