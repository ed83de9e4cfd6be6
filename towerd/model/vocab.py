"""The tokenizer of a loaded model: text to ids, ids to bytes.

Every method may be called from any thread: libllama's vocabulary is immutable after loading,
and the calls release the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from towerd.errors import InvalidRequest, ModelError
from towerd.llama_library import lib
from towerd.media_ids import spans_of
from towerd.model.deepstack import (
    RUN_BYTES_SAFE,
    call_deep,
    longest_run,
    needs_deep_stack,
)
from towerd.tokens import Ids

T = TypeVar("T")

TEXT_BYTES_MAX = (1 << 31) - 8
"""llama.cpp counts text and tokens in int32."""

MEDIUM = b"<__media__>"
"""What history shows in the place of a picture or a sound."""
_PIECE_BYTES = 256  # longer pieces (rare) take a second call
_DETOKENIZED_AT_ONCE = 1 << 16
_INT32_P = ctypes.POINTER(ctypes.c_int32)


class Vocab:
    """Tables and calls of one model's vocabulary; valid as long as the model is loaded."""

    def __init__(self, model_ptr: Any) -> None:
        """Reads every token's bytes once (a fraction of a second at 150,000 tokens).

        Raises ModelError when the GGUF has no tokenizer."""
        self.ptr: Any = lib.llama_model_get_vocab(model_ptr)
        self.vocab_type = int(lib.llama_vocab_type(self.ptr))
        if self.vocab_type == lib.LLAMA_VOCAB_TYPE_NONE:
            raise ModelError("The model has no tokenizer; convert it again with its vocabulary.")
        self._pre = _metadata(model_ptr, b"tokenizer.ggml.pre")
        is_bpe = self.vocab_type == lib.LLAMA_VOCAB_TYPE_BPE
        self.is_deep = is_bpe and needs_deep_stack(self._pre)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.ptr))
        self.bos_id = int(lib.llama_vocab_bos(self.ptr))
        self.eos_id = int(lib.llama_vocab_eos(self.ptr))
        self.add_bos = bool(lib.llama_vocab_get_add_bos(self.ptr))
        self.add_eos = bool(lib.llama_vocab_get_add_eos(self.ptr))
        self.pieces = self._read_pieces()
        is_eog = lib.llama_vocab_is_eog
        self.eog_ids = frozenset(i for i in range(self.n_vocab) if is_eog(self.ptr, i))

    @cached_property
    def names(self) -> list[bytes]:
        """How each control token is written; b"" for the others."""
        attributes, control = lib.llama_vocab_get_attr, lib.LLAMA_TOKEN_ATTR_CONTROL
        return [
            piece if attributes(self.ptr, i) & control else b""
            for i, piece in enumerate(self.pieces)
        ]

    @property
    def bos_text(self) -> str:
        """The text of the BOS token, or "" when there is none."""
        return self._text(self.bos_id)

    @property
    def eos_text(self) -> str:
        """The text of the EOS token, or "" when there is none."""
        return self._text(self.eos_id)

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Ids:
        """int32[n] ids of a text of any length; NUL is a character like any other.

        `add_special` adds BOS/EOS as the model asks; `parse_special` reads control tokens in the
        text as such. Raises InvalidRequest for lone surrogates, more than 2 GiB, or (with some
        tokenizers) hundreds of kilobytes without a break."""
        if isinstance(text, str):
            try:
                text = text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"The text is not valid Unicode: {error}.") from error
        if len(text) > TEXT_BYTES_MAX:
            raise InvalidRequest(f"The text is {len(text)} bytes long; the limit is 2 GiB.")
        data = text
        return self.with_deep_stack(data, lambda: self._tokenize(data, add_special, parse_special))

    def with_deep_stack(self, text: bytes, work: Callable[[], T]) -> T:
        """`work()`, which tokenizes `text`, where there is stack enough for it; its exceptions pass
        through. Raises InvalidRequest when no stack is deep enough."""
        if not self.is_deep or len(text) <= RUN_BYTES_SAFE:
            return work()
        return call_deep(work, longest_run(text, self._pre))

    def _tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> Ids:
        # No tokenizer here makes more tokens than bytes plus BOS and EOS, but for an added
        # space prefix; the second pass is for that. The pages are only touched as far as used.
        room = len(text) + 2
        for _ in range(2):
            out = np.empty(room, np.int32)
            to = out.ctypes.data_as(_INT32_P), room
            n = int(lib.llama_tokenize(self.ptr, text, len(text), *to, add_special, parse_special))
            if n >= 0:
                return out[:n].copy() if n < room // 2 else out[:n]
            room = -n
        raise InvalidRequest("The text cannot be tokenized: it makes more than 2^31 tokens.")

    def detokenize(self, ids: Sequence[int] | Ids) -> bytes:
        """The bytes of all pieces in order, special tokens as text, and MEDIUM for each medium. Ids
        must be valid."""
        array, step = np.asarray(ids, np.int32), _DETOKENIZED_AT_ONCE
        if spans := spans_of(array):
            starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), None]
            parts = (array[a:b] for a, b in zip(starts, ends, strict=True))
            return MEDIUM.join(self.detokenize(part) for part in parts)
        return b"".join([self._joined(array[i : i + step]) for i in range(0, len(array), step)])

    def _joined(self, ids: Ids) -> bytes:
        """The text of a prompt goes into its reply: a hundred thousand pieces are gathered by their
        places in one table, since to look at each takes Python 0.1 us."""
        text, starts = self._table
        sizes = starts[ids + 1] - starts[ids]
        ends = np.cumsum(sizes)
        places = np.repeat(starts[ids] - (ends - sizes), sizes)
        places += np.arange(len(places))
        joined: bytes = text[places].tobytes()
        return joined

    @cached_property
    def _table(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """All pieces one after the other, and where each begins; the last one's end."""
        starts = np.cumsum([0, *map(len, self.pieces)], dtype=np.int64)
        return np.frombuffer(b"".join(self.pieces), np.uint8), starts

    def piece(self, token: int) -> bytes:
        """The bytes of one token; a special token's own text."""
        return self.pieces[token]

    def validate(self, ids: Sequence[int] | Ids) -> Ids:
        """`ids` as int32; InvalidRequest names the first that is not a token of this model."""
        try:
            wide = np.asarray(ids, dtype=np.int64).reshape(-1)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest("Token ids must be integers.") from error
        bad = np.flatnonzero((wide < 0) | (wide >= self.n_vocab))
        if len(bad):
            i = int(bad[0])
            raise InvalidRequest(
                f"Token id {int(wide[i])} at index {i} is not in the vocabulary "
                f"(0 <= id < {self.n_vocab})."
            )
        return wide.astype(np.int32)

    def _text(self, token: int) -> str:
        return self.pieces[token].decode("utf-8", "replace") if token >= 0 else ""

    def _read_pieces(self) -> list[bytes]:
        """Every piece, special tokens as text."""
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        address = ctypes.addressof(buffer)
        call, copy, vocab = lib.llama_token_to_piece, ctypes.string_at, self.ptr
        pieces = [b""] * self.n_vocab
        for i in range(self.n_vocab):
            n = call(vocab, i, buffer, _PIECE_BYTES, 0, True)
            pieces[i] = copy(address, n) if n >= 0 else self._read_piece(i, -n)
        return pieces

    def _read_piece(self, token: int, room: int) -> bytes:
        """A piece of more than `_PIECE_BYTES`."""
        buffer = ctypes.create_string_buffer(room)
        n = int(lib.llama_token_to_piece(self.ptr, token, buffer, room, 0, True))
        return buffer.raw[:n]


def _metadata(model_ptr: Any, key: bytes) -> str:
    buffer = ctypes.create_string_buffer(128)
    n = int(lib.llama_model_meta_val_str(model_ptr, key, buffer, 128))
    return buffer.value.decode("utf-8", "replace") if n >= 0 else ""
