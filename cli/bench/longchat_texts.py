"""Texts for `towerctl bench longchat`, as tokens of the model that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from gguf import GGUFReader

from towerd.codec.train.tasks import N_HEX, Fact, pair
from towerd.codec.train.teacher import silence_llama_cpp
from towerd.codec.vocabulary import GgufVocabulary
from towerd.errors import ConfigError

Ids = npt.NDArray[np.int64]

ZST = ".zst"
TEXT_BYTES_MAX = 16 << 20


class Speaker:
    """A model's tokenizer. Close it, or use it as a context manager. Raises ModelError."""

    def __init__(self, model: Path) -> None:
        silence_llama_cpp()
        self._vocabulary = GgufVocabulary(model)
        field = GGUFReader(model).get_field("tokenizer.ggml.bos_token_id")
        self.bos: Ids = np.array([] if field is None else [field.contents()], np.int64)

    def ids(self, text: str) -> Ids:
        """int64[n]; nothing is added."""
        return self._vocabulary.tokenize(text.encode()).astype(np.int64)

    def windows(self, text: str, n_windows: int, n: int) -> Ids:
        """[n_windows, n]: runs of a text spread over it, each after the start symbol. Raises
        ConfigError where the text is too short."""
        ids, n_own = self.ids(text), n - len(self.bos)
        if len(ids) < n_windows * n_own:
            raise ConfigError(f"{n_windows} windows of {n} tokens need a longer text.")
        starts = np.linspace(0, len(ids) - n_own, n_windows).astype(int)
        return np.stack([np.concatenate([self.bos, ids[at : at + n_own]]) for at in starts])

    def close(self) -> None:
        self._vocabulary.close()

    def __enter__(self) -> Speaker:
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


def read_meetings(path: Path) -> str:
    """The transcripts of QMSum's test meetings, a line a turn. Raises ConfigError."""
    lines: list[str] = []
    for record in _records(path):
        if record.get("split") == "test":
            lines += [f"{speaker}: {said}" for speaker, said in record["transcript"]]
    if not lines:
        raise ConfigError(f"{path} holds no test meetings of QMSum.")
    return "\n".join(lines)


def read_pairs(path: Path, n_max: int) -> list[tuple[list[Fact], int]]:
    """(facts, number of the one that is asked for) of each example of "Lost in the Middle"'s
    key-value task; identifiers are cut to their first letters, so that 75 fit. Raises ConfigError."""
    found = []
    for record in _records(path):
        records = record["ordered_kv_records"]
        facts = [pair(key[:N_HEX], value[:N_HEX]) for key, value in records]
        found.append((facts, [key for key, _ in records].index(record["key"])))
    if not found:
        raise ConfigError(f"{path} holds no key-value examples.")
    return found[:n_max]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for line in read_text(path).split("\n"):
            if line.strip():
                yield msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, KeyError) as error:
        raise ConfigError(f"{path} is not the data set that is needed: {error}.") from error
