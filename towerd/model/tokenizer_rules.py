"""The part of a tokenizer identity that tokens alone do not show: how text is cut into them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from towerd.codec.vocabulary import probe
from towerd.errors import DiskFull, StoreError
from towerd.llama_library import lib
from towerd.model.gguf_keys import GgufKeys
from towerd.model.model_file import Memo
from towerd.store import Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.state.probes import note_probe
from towerd.tokens import Ids

log = logging.getLogger(__name__)

_SCALARS = ("model", "pre")
_ARRAYS = ("token_type", "scores")
_CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN | lib.LLAMA_TOKEN_ATTR_UNUSED


def tokenizer_rules(path: Path, model_hash: str, memo: Memo) -> str | None:
    """A hash of a GGUF's merges, scores, token types and pre-tokenizer, remembered by the hash of
    its bytes; None if ggml cannot read the file. Ids of special tokens and templates are left out:
    they change neither what ids mean nor how text is cut."""
    key = f"tokenizer_rules:{model_hash}"
    known = memo.get_meta(key)
    if known is not None:
        return known
    try:
        keys = GgufKeys(path)
    except ValueError:
        return None
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name in _SCALARS:
            digest.update(str(keys.get(f"tokenizer.ggml.{name}", "")).encode() + b"\0")
        for name in _ARRAYS:
            values = keys.get(f"tokenizer.ggml.{name}") or []
            digest.update(np.array([len(values), *values], "<f4").tobytes())
        for merge in keys.strings("tokenizer.ggml.merges"):
            digest.update(merge + b"\0")
    finally:
        keys.close()
    found = digest.hexdigest()
    with suppress(DiskFull):
        memo.set_meta(key, found)
    return found


def check_tokenizer(store: Store, tokenize: Callable[[bytes], Ids]) -> None:
    """Say so if the served model's tokenizer cuts text otherwise than at the last start, which only
    another llama.cpp does. The cold tier then renews what was coded before."""
    with suppress(DiskFull):  # the next start asks again
        digest = store.state.identity.tokenizer_digest
        if note_probe(store.state, digest, probe(tokenize)):
            log.warning(
                "this llama.cpp cuts text into other tokens than the one of the last start: coded "
                "conversations are renewed while nothing else runs, or stay readable as text"
            )


def keep_vocabulary(store: Store, pieces: Sequence[bytes], vocab_ptr: Any) -> None:
    """Keep a copy of the served model's vocabulary in the store, unless there is one. `pieces`:
    control tokens as text. If it cannot be written, the next start tries again."""
    digest = store.state.identity.tokenizer_digest
    if store.vocabularies.has(digest):
        return
    vocabulary = _kept_vocabulary(pieces, vocab_ptr)
    try:
        with store.locked():  # another process may write one
            store.vocabularies.keep(digest, vocabulary)
    except StoreError as error:
        log.warning("the vocabulary could not be kept", extra={"error": error.message})


def _kept_vocabulary(pieces: Sequence[bytes], vocab_ptr: Any) -> KeptVocabulary:
    attributes = lib.llama_vocab_get_attr
    control = [bool(attributes(vocab_ptr, token) & _CONTROL) for token in range(len(pieces))]
    return KeptVocabulary(
        [b"" if is_control else piece for piece, is_control in zip(pieces, control, strict=True)],
        [piece if is_control else b"" for piece, is_control in zip(pieces, control, strict=True)],
    )
