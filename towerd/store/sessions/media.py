"""Pictures and sounds of sessions, as their clients sent them: with these they are evaluated again where their rows are
gone, and shown to who reads the conversation on another device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from towerd.store.catalog.catalog import Catalog
from towerd.store.sessions.conversations import Locked
from towerd.tokens import Ids, ids_bytes

KEY_BYTES = 16
FILE_BYTES_MAX = 32 << 20
"""Larger ones are not kept: their client has them."""


@dataclass(frozen=True, slots=True)
class SentMedium:
    """A file that a client sent. `key`: of the ids that stand for the first medium that is made of it."""

    key: bytes
    file: bytes


def medium_key(ids: Ids) -> bytes:
    """The name of the medium that these ids stand for, 16 bytes."""
    return hashlib.blake2b(ids_bytes(ids), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class MediaTable:
    """The media of the sessions of one tokenizer. Thread-safe."""

    catalog: Catalog
    locked: Locked
    tokenizer: int

    def session(self, id: str, scope: str) -> int | None:
        """The row of a session, by which the others are asked; None: there is none."""
        sql = "SELECT pk FROM sessions WHERE (tokenizer, scope, id) = (?, ?, ?)"
        with self.locked():
            rows = self.catalog.rows(sql, (self.tokenizer, scope, id))
        return rows[0][0] if rows else None

    def keys(self, session: int) -> set[bytes]:
        """The names of a session's media."""
        with self.locked():
            return _keys(self.catalog, session)

    def file(self, session: int, key: bytes) -> bytes | None:
        """What was sent; None: it is not kept."""
        with self.locked():
            rows = self.catalog.sealed("media", "session = ? AND key = ?", (session, key))
        return rows[0]["body"] if rows else None

    def files(self, session: int, first: bytes) -> Iterator[bytes]:
        """All of a session, the one of the name `first` before the others."""
        for key in sorted(self.keys(session), key=lambda key: key != first):
            if (found := self.file(session, key)) is not None:
                yield found


def keep_media(catalog: Catalog, session: int, media: Sequence[SentMedium], now: float) -> None:
    """Keep those that a session does not have, inside a transaction."""
    known = _keys(catalog, session) if media else set()
    for each in _new(media, known):
        catalog.insert("media", session=session, key=each.key, body=each.file, created=now)


def forget_media(catalog: Catalog, session: int) -> None:
    """Delete those of a session, inside the transaction that deletes it."""
    catalog.run("DELETE FROM media WHERE session = ?", (session,))


def _keys(catalog: Catalog, session: int) -> set[bytes]:
    rows = catalog.rows("SELECT key FROM media WHERE session = ?", (session,))
    return {key for (key,) in rows}


def _new(media: Iterable[SentMedium], known: set[bytes]) -> Iterator[SentMedium]:
    for each in media:
        if each.key not in known and len(each.file) <= FILE_BYTES_MAX:
            known.add(each.key)
            yield each
