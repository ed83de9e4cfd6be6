"""The chats of another tokenizer in a simulated store: a client brings them along, with the words that they are of and
their pictures."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from simulation import codec, medium_name, named

from towerd import tower_file
from towerd.cold.coding import SessionModel
from towerd.errors import DiskLimitReached, StoreError
from towerd.media_ids import spans_of
from towerd.store import Store
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.sessions.history import History, PastTurn
from towerd.store.sessions.media import file_digest, medium_key
from towerd.store.tree.scope import tenant_of
from towerd.transfer import import_session

if TYPE_CHECKING:
    from house import House

OTHERS = TokenizerIdentity("never served here")
DIGEST = OTHERS.digest()
N_WORDS = 400
LISTED_MAX = 1000
WORDS_MAX = 8
"""Different ones in a chat."""
KNOWN_PICTURE = bytes(range(200))
"""That several chats have."""
LIE = b"another picture"
Chat: TypeAlias = tuple[int, ...]
Setting: TypeAlias = Callable[..., AbstractContextManager[object]]
"""What the block does sets these, unless it ends with one of these errors: see `Client`."""


@cache
def _words() -> KeptVocabulary:
    return KeptVocabulary([b"word %d " % id for id in range(N_WORDS)], [b""] * N_WORDS)


def text_of(ids: Chat) -> str:
    """What a chat says."""
    return _words().text(np.array(ids, np.int32))


def _key(ids: Chat) -> bytes | None:
    """The name of the picture in a chat; None: it has none."""
    array = np.array(ids, np.int32)
    return next((medium_key(array[start:end]) for start, end in spans_of(array)), None)


def _medium(scope: str, name: str, key: bytes) -> tuple[str, str]:
    """What is told of the picture of a chat."""
    return "medium", medium_name(named(scope, name), key)


def _file(name: str, ids: Chat, picture: bytes) -> bytes:
    """A chat as a .tower file. picture: what its medium is made of, if it has one"""
    source = tower_file.Source("other", "", b"8 bytes!", N_WORDS, OTHERS)
    turn = PastTurn(None, 0, 0, 1, len(ids) - 1, 0, 1.0, 1.0, True)
    history = History(name, True, "", 1.0, 1.0, 0, (turn,), (), np.array(ids, np.int32))
    file, key = tower_file.TowerFile(source, history, _words()), _key(ids)
    if key is None:
        return tower_file.write(file)
    medium = tower_file.CarriedMedium(key, 0, file_digest(picture), len(picture))
    return tower_file.write(replace(file, media=(medium,))) + picture


class Words:
    """What tenants brought along, of which some was deleted."""

    def __init__(self) -> None:
        self._brought: dict[tuple[str, str], set[int]] = {}

    def bring(self, scope: str, name: str, ids: Sequence[int]) -> None:
        """A chat is asked for."""
        self._brought[scope, name] = {id for id in ids if id >= 0}

    def delete(self, scope: str, name: str) -> None:
        """A chat is deleted."""
        del self._brought[scope, name]

    def check(self, store: Store) -> None:
        """After a gc each tenant has the words of its chats, and none of what it deleted. A power cut may have met a chat
        between its words and itself."""
        said, may_be = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
        for info in store.foreign.listing(None, LISTED_MAX):
            ids, _ = store.foreign.session_ids(info.id, info.scope)
            said[tenant_of(info.scope)].update(ids[ids >= 0].tolist())
        for (scope, _), words in self._brought.items():
            may_be[tenant_of(scope)] |= words
        for tenant in {*said, *may_be}:
            known: set[int] = set()
            with suppress(StoreError):
                known.update(store.vocabularies.words(DIGEST, tenant).some())
            assert said[tenant] <= known, f"{tenant} lacks words {said[tenant] - known}"
            left = known - said[tenant] - may_be[tenant]
            assert not left, f"words {left} are left of chats that {tenant} deleted"


class ForeignChats:
    """Those of one client."""

    def __init__(
        self, name: str, scope: str, rng: random.Random, house: House, setting: Setting
    ) -> None:
        """name: of the client; scope: its tenant"""
        self._name, self._scope, self._rng = name, scope, rng
        self._house, self._setting = house, setting

    def _known(self) -> dict[str, tuple[int, ...]]:
        found = self._house.told.last("foreign").items()
        return {
            name: ids
            for (scope, name), ids in found
            if scope == self._scope and name.startswith(f"{self._name}-")
        }

    def bring(self) -> None:
        """Import a chat, and read all."""
        name = f"{self._name}-{self._rng.randint(0, 1 << 32)}"
        words = self._rng.sample(range(N_WORDS), self._rng.randint(1, WORDS_MAX))
        ids = tuple(self._rng.choice(words) for _ in range(self._rng.randint(2, 40)))
        picture = self._rng.choice((b"", KNOWN_PICTURE, self._rng.randbytes(99)))
        if picture:
            ids = (
                *ids,
                -(1 << 31) + self._rng.randint(0, 1 << 16),
                -self._rng.randint(1, 99),
                *ids,
            )
        self._house.words.bring(self._scope, name, ids)
        self._import(name, ids, picture)
        self.read()

    def bring_again(self) -> None:
        """Import a chat that is here, from a file that has its picture, or says that it is another one."""
        house, known = self._house, self._known()
        pictures = house.told.last("medium")
        for name, ids in sorted(known.items()):
            key = _key(ids)
            medium = None if key is None else _medium(self._scope, name, key)
            if medium is None or not isinstance(pictures.get(medium[1]), bytes):
                continue
            picture = pictures[medium[1]]
            is_here = house.told.allowed(medium) == [picture]
            self._import(name, ids, LIE if is_here and self._rng.random() < 0.5 else picture)
            break
        self.read()

    def _import(self, name: str, ids: Chat, picture: bytes) -> None:
        house, key = self._house, _key(ids)
        told: dict[object, object] = {("foreign", (self._scope, name)): ids}
        kept = {} if key is None else {_medium(self._scope, name, key): picture}
        model, n_refused = SessionModel("here", "hash", codec()), house.disk.n_refused
        with self._setting(told | ({} if picture == LIE else kept), DiskLimitReached):
            import_session(house.store, model, _file(name, ids, picture), self._scope)
            if house.store.disk.bytes_max or house.disk.n_refused > n_refused:
                house.told.begin(dict.fromkeys(kept))  # there may be no room for it

    def read(self) -> None:
        """Every chat says what it said."""
        for name, ids in self._known().items():
            said = foreign_text(self._house.store, name, self._scope)
            assert said == text_of(ids), f"{name} says otherwise"

    def leave(self) -> None:
        """Delete a chat."""
        known = self._known()
        if known:
            name = self._rng.choice(sorted(known))
            gone: dict[object, object] = {("foreign", (self._scope, name)): None}
            key = _key(known[name])
            if key is not None:
                gone[_medium(self._scope, name, key)] = None
            with self._setting(gone):
                self._house.store.foreign.delete(name, self._scope)
                self._house.words.delete(self._scope, name)


def foreign_text(store: Store, name: str, scope: str) -> str:
    """What a chat of another tokenizer says, by the words that its tenant has."""
    ids, digest = store.foreign.session_ids(name, scope)
    return store.vocabularies.read(digest, scope).text(ids)


def foreign_in(store: Store) -> dict[object, object]:
    """The chats of other tokenizers that a store has, each of which can be read, and their pictures."""
    found: dict[object, object] = {}
    for info in store.foreign.listing(None, LISTED_MAX):
        ids, _ = store.foreign.session_ids(info.id, info.scope)
        kept = found["foreign", (info.scope, info.id)] = tuple(ids.tolist())
        assert foreign_text(store, info.id, info.scope) == text_of(kept), f"{info.id} is not kept"
        row = store.media.session(info.id, info.scope, info.tokenizer)
        assert row is not None, f"{info.id} is listed and has no row"
        for key in store.media.keys(row):
            found[_medium(info.scope, info.id, key)] = store.media.file(row, key)
    return found
