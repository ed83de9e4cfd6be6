"""The tokenizer in a GGUF, read with llama.cpp; no tensors are loaded.

Beside it: whether a tokenizer still cuts text as it did, and text cut by its pieces alone."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.codec.errors import UnknownModel
from towerd.llama_library import lib
from towerd.tokens import Ids

_PIECE_BYTES = 64
_INT32_P = ctypes.POINTER(ctypes.c_int32)
_MATCH_BYTES_MAX = 24
TEXTS = (
    "The quick brown fox doesn't jump; it's 'tired', isn't it? Naïve café, Straße, Ångström.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。今日は良い天気ですね、東京へ行きましょう。다람쥐 헌 쳇바퀴에 타고파.",
    "نص حكيم له سر قاطع وذو شأن عظيم. דג סקרן שט בים. ऋषियों को सताने वाले दुष्ट। ภาษาไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 🇩🇪 e\u0301 ﷽ \u200b\u00a0\ufeff 𝔘𝔫𝔦",
    'def f(x: int) -> str:\n\treturn f"{x!r:>8}"  # later\n\nfor (i=0; i<n; ++i) { a[i] += 0x1F; }\r\n',
    "0 1 12 123 1234 12345 3.14159 1,000,000 -7 2026-11-25T23:59:59Z v1.2.3 5e-324 ½ ²",
    "a b  c   d    e     f      \n\n\n \n\t\t\t \r\n  \n" + " " * 64 + "." + "\n" * 9,
    "<s></s> <|im_start|>user <|im_end|> [INST] <bos> <0x41> <unk> <|endoftext|> ▁x Ġy </think>",
    "https://example.org/a?b=c&d=%20#e user@example.com C:\\dir\\file $HOME ---===*** aaaaaaaaaaaaaaaa",
)
"""Many scripts, joined emoji, code, numbers, runs of spaces and what looks like control tokens."""


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


def probe(tokenize: Callable[[bytes], Sequence[int] | Ids]) -> str:
    """32 hex digits of the ids that `tokenize` gives for TEXTS."""
    digest = hashlib.blake2b(digest_size=16)
    for text in TEXTS:
        ids = np.asarray(tokenize(text.encode()), "<i4")
        digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    return digest.hexdigest()


def longest_matches(text: bytes, pieces: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Ids that spell `text`, each the longest piece that fits; other bytes are skipped."""
    table = {}
    for token in range(len(pieces) - 1, -1, -1):
        if 0 < len(pieces[token]) <= _MATCH_BYTES_MAX:
            table[pieces[token]] = token
    longest: dict[bytes, int] = {}
    for piece in table:
        longest[piece[:2]] = max(len(piece), longest.get(piece[:2], 0))
    found, at = [], 0
    while at < len(text):
        length = longest.get(text[at : at + 2], 1)
        while length and text[at : at + length] not in table:
            length -= 1
        if length:
            found.append(table[text[at : at + length]])
        at += length or 1
    return np.array(found, np.int64)
