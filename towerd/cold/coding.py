"""The codec of the served model, whose vocabulary is read at the first use and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from towerd.engine.base import ModelInfo
from towerd.errors import ConfigError, NotSupported
from towerd.slots.row_identity import REPORTED_HASH_PREFIX, tokenizer_hash

if TYPE_CHECKING:
    from towerd.codec import Codec
    from towerd.codec.vocabulary import GgufVocabulary


@dataclass(frozen=True, slots=True)
class SessionModel:
    """The model whose token ids the sessions consist of."""

    name: str
    """The file name, for messages."""
    hash: str
    """The row identity's `model_hash`."""
    codec: Codec
    """The codec of the model's vocabulary."""


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """The file that the vocabulary is read from, and what is known about its model."""

    path: Path
    """The model's GGUF; an empty path if it is unknown."""
    hash: str
    """The row identity's `model_hash`."""
    n_vocab: int | None = None
    """Number of tokens in the model's vocabulary, if known."""
    tokenizer: str | None = None
    """The row identity's `tokenizer`, if it was computed from the model's own tokens."""


def vocabulary_source(info: ModelInfo) -> VocabularySource:
    """The vocabulary source of the model that an engine serves."""
    known = info.row_identity
    tokenizer = None if known.model_hash.startswith(REPORTED_HASH_PREFIX) else known.tokenizer
    return VocabularySource(Path(info.path), known.model_hash, info.n_vocab, tokenizer)


class Coding:
    """The codec of one model. Thread-safe."""

    def __init__(
        self,
        source: Callable[[], VocabularySource],
        tables: Path | None = None,
        student: Path | None = None,
    ) -> None:
        """source: called at the first use of the codec. tables, student: see `Codec`."""
        self._source = source
        self._tables, self._student = tables, student
        self._vocabulary: GgufVocabulary | None = None
        self._model: SessionModel | None = None
        self._lock = threading.Lock()

    @property
    def codec(self) -> Codec:
        """The model's codec. Raises NotSupported if its vocabulary cannot be read."""
        return self.model().codec

    def model(self) -> SessionModel:
        """The model and its codec. Raises NotSupported if its vocabulary cannot be read."""
        with self._lock:
            if self._model is None:
                source = self._source()
                vocabulary = self._vocabulary = _vocabulary(source)
                from towerd.codec import Codec

                codec = Codec(vocabulary, tables=self._tables, student=self._student)
                self._model = SessionModel(source.path.name, source.hash, codec)
            return self._model

    def close(self) -> None:
        """Free the vocabulary; no thread may be using the codec."""
        with self._lock:
            if self._vocabulary is not None:
                self._vocabulary.close()
            self._vocabulary = self._model = None


def check_codec_model(path: Path) -> None:
    """ConfigError unless conversations can be coded with the model in this file."""
    # Imported late: these load llama.cpp.
    from towerd.codec.errors import CodecError
    from towerd.codec.forms.mini import check_student
    from towerd.model.llama_model import init_backend

    init_backend()  # routes llama.cpp's messages into our log
    try:
        check_student(path)
    except CodecError as error:
        raise ConfigError(f"--codec-model: {error}") from error


def _vocabulary(source: VocabularySource) -> GgufVocabulary:
    # Imported late: these load llama.cpp.
    from towerd.codec.errors import CodecError
    from towerd.codec.vocabulary import GgufVocabulary
    from towerd.model.llama_model import init_backend

    where = source.path if source.path.name else "its path is not known"
    init_backend()  # routes llama.cpp's messages into our log
    try:
        vocabulary = GgufVocabulary(source.path)
    except CodecError as error:
        raise NotSupported(
            "Coding a conversation needs the model's vocabulary, but its GGUF cannot be read "
            f"here ({where}): make it readable for towerd."
        ) from error
    if source.n_vocab not in (None, vocabulary.n_tokens):
        vocabulary.close()
        raise NotSupported(
            f"{source.path} has {vocabulary.n_tokens} tokens, but the served model has "
            f"{source.n_vocab}: put the model's own file there and restart towerd."
        )
    if source.tokenizer not in (None, tokenizer_of(vocabulary)):
        vocabulary.close()
        raise NotSupported(
            f"{source.path} has another tokenizer than the model that is served: name that model's "
            "file with --model, or put it back there and restart towerd."
        )
    return vocabulary


def tokenizer_of(vocabulary: GgufVocabulary) -> str:
    """The hash of a vocabulary's tokens, computed as a row identity's `tokenizer`."""
    both = zip(vocabulary.pieces, vocabulary.names, strict=True)
    return tokenizer_hash(piece or name for piece, name in both)
