"""The tokenizer in a GGUF, read with llama.cpp; no tensors are loaded."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from towerd.codec.errors import UnknownModel
from towerd.llama_library import lib
from towerd.tokens import Ids

_PIECE_BYTES = 64
_INT32_P = ctypes.POINTER(ctypes.c_int32)


class GgufVocabulary:
    """The `TokenVocabulary` of a GGUF file. Close it, or use it as a context manager. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """UnknownModel if the file cannot be read or has no tokenizer."""
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self._model: Any = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise UnknownModel(f"{path} cannot be loaded: it must be a GGUF with a tokenizer.")
        self._ptr = lib.llama_model_get_vocab(self._model)
        self._n_running, self._changed = 0, threading.Condition()
        self.n_tokens = int(lib.llama_vocab_n_tokens(self._ptr))
        self._pieces, self._names = self._read()

    @property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of each id as text; b"" for control tokens."""
        return self._pieces

    @property
    def names(self) -> Sequence[bytes]:
        """How each control token is written; b"" for the others."""
        return self._names

    def tokenize(self, text: bytes) -> Ids:
        """int32[n] ids of UTF-8 text; nothing is added and no control token parsed. UnknownModel once
        it is closed."""
        room = len(text) + 8
        with self._open():
            for _ in range(2):
                out = np.empty(room, np.int32)
                n = int(
                    lib.llama_tokenize(
                        self._ptr, text, len(text), out.ctypes.data_as(_INT32_P), room, False, False
                    )
                )
                if n >= 0:
                    return out[:n]
                room = -n
        raise ValueError("The text makes more than 2^31 tokens.")

    @contextmanager
    def _open(self) -> Iterator[None]:
        """The model is not freed during the block."""
        with self._changed:
            if not self._model:
                raise UnknownModel("The vocabulary is closed: the daemon is stopping.")
            self._n_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Free the model, once no thread uses it."""
        with self._changed:
            self._changed.wait_for(lambda: self._n_running == 0)
            if self._model:
                lib.llama_model_free(self._model)
                self._model = None

    def __enter__(self) -> GgufVocabulary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> tuple[list[bytes], list[bytes]]:
        special = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        special |= lib.LLAMA_TOKEN_ATTR_UNUSED
        pieces, names = [], []
        for token in range(self.n_tokens):
            control = bool(lib.llama_vocab_get_attr(self._ptr, token) & special)
            piece = self._piece(token)
            pieces.append(b"" if control else piece)
            names.append(piece if control else b"")
        return pieces, names

    def _piece(self, token: int) -> bytes:
        # For a piece longer than the buffer, llama.cpp returns minus its length; call it again.
        room = _PIECE_BYTES
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            n = int(lib.llama_token_to_piece(self._ptr, token, buffer, room, 0, True))
            if n >= 0:
                return buffer.raw[:n]
            room = -n
        return b""
