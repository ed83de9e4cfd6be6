"""The turns of a conversation as what was said in each, whatever its tokenizer, frozen or not."""

from __future__ import annotations

from contextlib import suppress

from towerd.cold.coding import Coding
from towerd.cold.freezing import cold_history
from towerd.cold.reading import TextReader
from towerd.errors import NotFound, SessionFrozen, ThawError
from towerd.search.index import Passage, SessionKey
from towerd.search.speech import ChatMessage, first_question, messages, spoken
from towerd.store import SessionInfo, Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.sessions.history import History
from towerd.tokens import Ids

BEGINNING_TOKENS = 32


class TurnReader:
    """Reads the sessions of one store. Thread-safe; never changes anything.

    Its methods raise NotFound, NotSupported (a frozen session needs the served model's vocabulary,
    and its file cannot be read) and StoreError (a vocabulary is not kept)."""

    def __init__(self, store: Store, coding: Coding) -> None:
        self._store = store
        self._coding = coding
        self._texts = TextReader(store, coding)
        self._last: tuple[str, KeptVocabulary] | None = None

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
        return messages(ids, self._vocabulary(self.own_tokenizer))

    def begins(self, ids: Ids) -> str:
        """How the text of tokens of the served model begins, control tokens as they are written."""
        return self._vocabulary(self.own_tokenizer).text(ids[:BEGINNING_TOKENS])

    def passages(self, info: SessionInfo, known: set[int]) -> tuple[list[Passage], str]:
        """What was said in each turn that is not in `known`, and the first question of all."""
        if info.tokenizer:
            return self._foreign_passages(info)
        turns = self._store.turns(info.id, info.scope)
        try:
            history = self._history(info)
        except ThawError:  # its text can be read all the same
            said = [ChatMessage("", self._texts.text(info.id, info.scope))]
            return _whole(info, spoken(said)), first_question(said)
        vocabulary = self._vocabulary(self.own_tokenizer)
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
            return [ChatMessage("", self._texts.text(info.id, info.scope))]
        return messages(ids, self._vocabulary(self.own_tokenizer))

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
            return [ChatMessage("", self._texts.foreign_text(*which))]
        return messages(ids, self._vocabulary(info.tokenizer, info.scope))

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
