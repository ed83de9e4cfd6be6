"""The tokenizer of a model, for the texts that it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from towerd.codec.vocabulary import GgufVocabulary
from towerd.errors import ConfigError
from towerd.model.llama_model import init_backend

Ids = npt.NDArray[np.int64]


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
