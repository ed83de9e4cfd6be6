"""Conversations on disk: *.jsonl.zst, one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from towerd.errors import ConfigError

SUFFIX = ".jsonl.zst"


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class ChatRecord(msgspec.Struct, frozen=True):
    """One conversation or document. `src` is "<source>/<id>"."""

    src: str
    messages: list[Message]

    @property
    def source(self) -> str:
        """The row of the manifest that it belongs to."""
        return self.src.partition("/")[0]


def read_records(path: Path) -> Iterator[ChatRecord]:
    """The records of one file in order. Raises ConfigError with the number of a bad line."""
    decoder = msgspec.json.Decoder(ChatRecord)
    number = 0
    try:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                record = decoder.decode(line)
                if not record.messages:
                    raise ConfigError(f"{path}, line {number}: a record without messages.")
                yield record
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}, line {number}: not a record of src and messages with role and content "
            f"({error})."
        ) from error
    except (OSError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _lines(path: Path) -> Iterator[bytes]:
    """The lines, split at line feeds only: the text may contain any other separator."""
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        rest = b""
        while block := stream.read(1 << 20):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        if rest:
            yield rest
