"""Texts for `towerctl bench longchat`, and the tokenizer of the model that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from gguf import GGUFReader

from towerd.cli.bench.tasks import N_HEX, Fact, pair
from towerd.codec.vocabulary import GgufVocabulary
from towerd.engine.embedded.model.model import init_backend
from towerd.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
Ids = npt.NDArray[np.int64]

ZST = ".zst"
TEXT_BYTES_MAX = 16 << 20


class TextTokenizer:
    """A model's tokenizer. Close it, or use it as a context manager. Raises ModelError."""

    def __init__(self, model: Path) -> None:
        init_backend()  # llama.cpp's log becomes ours
        self._vocabulary = GgufVocabulary(model)
        field = GGUFReader(model).get_field("tokenizer.ggml.bos_token_id")
        self.bos: Ids = np.array([] if field is None else [field.contents()], np.int64)

    def ids(self, text: str) -> Ids:
        """int64[n], without any added tokens."""
        return self._vocabulary.tokenize(text.encode()).astype(np.int64)

    def text(self, ids: Ids) -> str:
        """The text of these tokens; incomplete characters at the ends are dropped."""
        pieces = self._vocabulary.pieces
        return b"".join(pieces[i] for i in ids).decode(errors="ignore")

    def windows(self, text: str, n_windows: int, n: int) -> Ids:
        """[n_windows, n]: windows spread evenly over a text, each after the BOS token. Raises
        ConfigError if the text is too short."""
        ids, n_own = self.ids(text), n - len(self.bos)
        if len(ids) < n_windows * n_own:
            raise ConfigError(f"{n_windows} windows of {n} tokens need a longer text.")
        starts = np.linspace(0, len(ids) - n_own, n_windows).astype(int)
        return np.stack([np.concatenate([self.bos, ids[at : at + n_own]]) for at in starts])

    def close(self) -> None:
        self._vocabulary.close()

    def __enter__(self) -> TextTokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
