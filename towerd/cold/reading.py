"""Conversations as text, also where their tokens cannot be had: those of another tokenizer, and those
whose text this llama.cpp cuts otherwise than the one that coded them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from towerd.codec.errors import CodecError
from towerd.cold.coding import Coding
from towerd.errors import SessionFrozen, ThawError
from towerd.store import Store
from towerd.store.catalog.vocabularies import MEDIUM, KeptVocabulary
from towerd.store.sessions.frozen import FrozenSession

if TYPE_CHECKING:
    from towerd.codec import Codec


class TextReader:
    """Reads the sessions of one store. Thread-safe; never changes anything."""

    def __init__(self, store: Store, coding: Coding) -> None:
        self._store = store
        self._coding = coding
        self._lock = threading.Lock()
        self._last: tuple[bytes, Codec] | None = None

    def text(self, id: str, scope: str | None = None) -> str:
        """The text of a frozen session of the served model's tokenizer; see `text_of`. Raises
        NotFound, StoreError (ambiguous id), ThawError (damaged, or not frozen) or NotSupported."""
        frozen = self._store.cold.read(id, scope)
        if frozen is None:
            raise ThawError(f"Session {id!r} was thawed just now: ask again.")
        return text_of(self._coding.codec, frozen)

    def foreign_text(self, id: str, scope: str | None = None, tokenizer: str = "") -> str:
        """The text of a session of another tokenizer; see `text_of`. Raises as `text`, and StoreError
        if the vocabulary is not kept."""
        foreign = self._store.foreign
        info = foreign.session(id, scope, tokenizer).info
        which = id, info.scope, info.tokenizer
        try:
            ids, digest = foreign.session_ids(*which)
        except SessionFrozen:
            frozen, digest = foreign.frozen(*which)
            return text_of(self._codec(digest, info.scope), frozen)
        return self._store.vocabularies.read(digest, info.scope).text(ids)

    def _codec(self, digest: bytes, scope: str) -> Codec:
        """The codec of a vocabulary that is kept for a tenant, which cannot tokenize; the last whole
        one stays in memory."""
        from towerd.codec import Codec  # imported late: it loads llama.cpp

        with self._lock:
            if self._last is not None and self._last[0] == digest:
                return self._last[1]
            is_whole = self._store.vocabularies.has(digest)
            vocabulary = self._store.vocabularies.read(digest, scope)
            codec = Codec(vocabulary, tables=self._store.tables)
            if is_whole:
                self._last = digest, codec
            return codec


def text_of(codec: Codec, frozen: FrozenSession) -> str:
    """The text of a frozen session's current branch. If its ids cannot be had, of all its branches,
    each after what it shares with those before, with MEDIUM at the end if there are media. Raises
    ThawError."""
    from towerd.codec.codec import WrittenText  # imported late: it loads llama.cpp

    vocabulary = KeptVocabulary(codec.vocabulary.pieces, codec.vocabulary.names)
    try:
        found = codec.read(frozen.blob, base=frozen.base)
    except CodecError as error:
        raise ThawError(f"Session {frozen.info.id!r} cannot be read: {error}") from error
    if not isinstance(found, WrittenText):
        history = frozen.history(np.concatenate([frozen.base, found]))
        return vocabulary.text(history.ids(history.leaf))
    said = vocabulary.spell(frozen.base) + found.spell(vocabulary)
    return said.decode("utf-8", "replace") + MEDIUM * bool(found.media)
