"""Conversations as text, and as what was said in each turn: whatever their tokenizer, frozen or not, also
where their tokens cannot be had because this llama.cpp cuts text otherwise than the one that coded them."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from towerd.codec.errors import CodecError
from towerd.cold.coding import Coding
from towerd.cold.freezing import cold_history
from towerd.errors import NotFound, SessionFrozen, ThawError
from towerd.search.chat import ChatPart, PlacedMessage, placed_messages
from towerd.search.index import Passage, SessionKey
from towerd.search.speech import ChatMessage, first_question, messages, spoken
from towerd.store import SessionInfo, Store
from towerd.store.catalog.vocabularies import MEDIUM, KeptVocabulary
from towerd.store.sessions.frozen import FrozenSession
from towerd.store.sessions.history import History
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.codec import Codec

BEGINNING_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ReadBranch:
    """A branch of a session, to be read and continued."""

    turn: int
    """At which it ends; 0 where that is not known."""
    ids: Ids
    n_prompt: int
    """Where the reply of that turn begins in `ids`; 0 where that is not known."""
    messages: list[PlacedMessage]


class TurnReader:
    """Reads the sessions of one store. Thread-safe; never changes anything.

    Its methods raise NotFound, NotSupported (a frozen session needs the served model's vocabulary,
    and its file cannot be read) and StoreError (a vocabulary is not kept)."""

    def __init__(self, store: Store, coding: Coding) -> None:
        self._store = store
        self._coding = coding
        self._last: tuple[str, KeptVocabulary] | None = None
        self._last_codec: Codec | None = None
        self._lock = threading.Lock()

    def key(self, info: SessionInfo) -> SessionKey:
        """The name of a session that is listed."""
        return SessionKey(info.tokenizer or self.own_tokenizer, info.scope, info.id)

    @property
    def own_tokenizer(self) -> str:
        """The hex digest of the served model's tokenizer."""
        return self._store.state.identity.tokenizer_digest.hex()

    def info(self, key: SessionKey) -> SessionInfo:
        """The session with this name. Raises NotFound."""
        if key.tokenizer == self.own_tokenizer:
            return self._store.session(key.id, key.scope)
        return self._store.foreign.session(key.id, key.scope, key.tokenizer).info

    def said(self, ids: Ids) -> list[ChatMessage]:
        """The messages in tokens of the served model."""
        return messages(ids, self.own_vocabulary())

    def begins(self, ids: Ids) -> str:
        """How the text of tokens of the served model begins, control tokens as they are written."""
        return self.own_vocabulary().text(ids[:BEGINNING_TOKENS])

    def own_vocabulary(self) -> KeptVocabulary:
        """The vocabulary of the served model."""
        return self._vocabulary(self.own_tokenizer)

    def text(self, id: str, scope: str | None = None) -> str:
        """The text of a frozen session of the served model's tokenizer; see `text_of`. Raises
        ThawError, too (damaged, or not frozen)."""
        frozen = self._store.cold.read(id, scope)
        if frozen is None:
            raise ThawError(f"Session {id!r} was thawed just now: ask again.")
        return text_of(self._coding.codec, frozen)

    def foreign_text(self, id: str, scope: str | None = None, tokenizer: str = "") -> str:
        """The text of a session of another tokenizer; see `text_of`. Raises ThawError, too."""
        foreign = self._store.foreign
        info = foreign.session(id, scope, tokenizer).info
        which = id, info.scope, info.tokenizer
        try:
            ids, _ = foreign.session_ids(*which)
        except SessionFrozen:
            frozen, digest = foreign.frozen(*which)
            return text_of(self._codec(digest.hex(), info.scope), frozen)
        return self._vocabulary(info.tokenizer, info.scope).text(ids)

    def passages(self, info: SessionInfo, known: set[int]) -> tuple[list[Passage], str]:
        """What was said in each turn that is not in `known`, and the first question of all."""
        if info.tokenizer:
            return self._foreign_passages(info)
        turns = self._store.turns(info.id, info.scope)
        try:
            history = self._history(info)
        except ThawError:  # its text can be read all the same
            said = [ChatMessage("", self.text(info.id, info.scope))]
            return _whole(info, spoken(said)), first_question(said)
        vocabulary = self.own_vocabulary()
        found: list[Passage] = []
        question = ""
        for place, turn in enumerate(turns[: len(history.turns)]):
            if turn.id not in known or place == 0:
                start, end = history.starts[place], history.starts[place + 1]
                said = messages(history.stream[start:end], vocabulary)
                if place == 0:
                    prompt = history.stream[: history.turns[0].n_prompt]
                    question = first_question(messages(prompt, vocabulary))
                found.append(Passage(turn.id, turn.created, spoken(said)))
        return found, question

    def branch(self, info: SessionInfo, turn: int | None = None) -> list[ChatMessage]:
        """The messages of the branch that ends with a turn; None: the current branch, which is all
        that is known of a session of another tokenizer. Raises NotFound."""
        if info.tokenizer:
            return self._foreign_messages(info)
        try:
            ids = self._branch_ids(info, turn)
        except ThawError:
            return [ChatMessage("", self.text(info.id, info.scope))]
        return messages(ids, self.own_vocabulary())

    def chat(self, info: SessionInfo, turn: int | None = None) -> ReadBranch:
        """The branch that ends with a turn, or the current one, in its messages. Where its tokens cannot be had,
        all of its text is one of these, and `ids` is empty. Raises NotFound."""
        try:
            if info.tokenizer:
                which = info.id, info.scope, info.tokenizer
                ids, _ = self._store.foreign.session_ids(*which)
                vocabulary = self._vocabulary(info.tokenizer, info.scope)
                return ReadBranch(0, ids, 0, placed_messages(ids, vocabulary))
            ids = self._branch_ids(info, turn)
        except (SessionFrozen, ThawError):
            said = self._foreign_messages(info) if info.tokenizer else self.branch(info, turn)
            whole = [PlacedMessage("", 0, [ChatPart("text", each.text)]) for each in said]
            return ReadBranch(0, np.zeros(0, np.int32), 0, whole)
        turns = {each.id: each for each in self._store.turns(info.id, info.scope)}
        last = turns.get((info.leaf if turn is None else turn) or 0)
        ends: list[int] = []
        limit, at = len(ids), last
        while at is not None and at.n_prompt + at.n_reply <= limit:
            ends[:0] = [at.n_prompt, at.n_prompt + at.n_reply]
            limit = at.n_prompt
            at = turns.get(at.parent or 0)
        messages = placed_messages(ids, self.own_vocabulary(), ends)
        if last is None:
            return ReadBranch(0, ids, 0, messages)
        return ReadBranch(last.id, ids, last.n_prompt, messages)

    def _branch_ids(self, info: SessionInfo, turn: int | None) -> Ids:
        if turn is None:
            with suppress(SessionFrozen):  # its end may have its tokens: it went on without a thaw
                return self._store.session_ids(info.id, info.scope)
        history = self._history(info)
        place = history.leaf
        if turn is not None:
            ids = [each.id for each in self._store.turns(info.id, info.scope)]
            if turn not in ids[: len(history.turns)]:
                raise NotFound(f"session {info.id!r} has no such turn")
            place = ids.index(turn)
        return history.ids(place) if history.turns else history.stream

    def _history(self, info: SessionInfo) -> History:
        if info.cold_bytes:
            found = cold_history(self._store, self._coding.codec, info.id, info.scope)
            if found is not None:
                return found
        return self._store.history(info.id, info.scope)

    def _foreign_passages(self, info: SessionInfo) -> tuple[list[Passage], str]:
        """The current branch as one passage: of another tokenizer's turns no more is kept apart."""
        said = self._foreign_messages(info)
        return _whole(info, spoken(said)), first_question(said)

    def _foreign_messages(self, info: SessionInfo) -> list[ChatMessage]:
        which = info.id, info.scope, info.tokenizer
        try:
            ids, _ = self._store.foreign.session_ids(*which)
        except SessionFrozen:
            return [ChatMessage("", self.foreign_text(*which))]
        return messages(ids, self._vocabulary(info.tokenizer, info.scope))

    def _codec(self, tokenizer: str, scope: str) -> Codec:
        """The codec of a vocabulary that is kept for a tenant, which cannot tokenize; that of the
        last whole one stays in memory."""
        from towerd.codec import Codec  # imported late: it loads llama.cpp

        with self._lock:
            vocabulary = self._vocabulary(tokenizer, scope)
            if self._last_codec is not None and self._last_codec.vocabulary is vocabulary:
                return self._last_codec
            codec = Codec(vocabulary, tables=self._store.tables)
            if self._last is not None and self._last[1] is vocabulary:
                self._last_codec = codec
            return codec

    def _vocabulary(self, tokenizer: str, scope: str | None = None) -> KeptVocabulary:
        """The vocabulary of a tokenizer that is kept for a tenant; the last whole one stays in
        memory."""
        last = self._last
        if last is not None and last[0] == tokenizer:
            return last[1]
        digest = bytes.fromhex(tokenizer)
        is_whole = self._store.vocabularies.has(digest)
        vocabulary = self._store.vocabularies.read(digest, scope)
        if is_whole:
            self._last = tokenizer, vocabulary
        return vocabulary


def leaf_of(info: SessionInfo) -> int:
    """The turn that all of a session is entered under where its turns cannot be told apart."""
    return info.leaf or 0


def _whole(info: SessionInfo, text: str) -> list[Passage]:
    """A text whose turns cannot be told apart."""
    return [Passage(leaf_of(info), info.updated, text, is_whole=True)]


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
        history = frozen.history(frozen.stream(found))
        return vocabulary.text(history.ids(history.leaf))
    said = vocabulary.spell(frozen.beginning) + found.spell(vocabulary)
    return said.decode("utf-8", "replace") + MEDIUM * bool(found.media)
