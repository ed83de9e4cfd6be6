"""Pictures and sounds of sessions, as their clients sent them: with these they are evaluated again where their rows are
gone, and shown to who reads the conversation on another device.

    media/NAME    the file of one medium of one session; the catalog has its checksum
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towerd.slots.errors import StateError
from towerd.store.catalog.catalog import Catalog
from towerd.store.files import durable
from towerd.store.files.directory import remove_file
from towerd.store.state.state import StoreState
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
    return _digest(ids_bytes(ids))


@dataclass(frozen=True, slots=True)
class MediaTable:
    """The media of the sessions of one tokenizer. Thread-safe."""

    state: StoreState

    def session(self, id: str, scope: str) -> int | None:
        """The row of a session, by which the others are asked; None: there is none."""
        sql = "SELECT pk FROM sessions WHERE (tokenizer, scope, id) = (?, ?, ?)"
        with self.state.locked():
            rows = self.state.catalog.rows(sql, (self.state.identity.tokenizer, scope, id))
        return rows[0][0] if rows else None

    def keys(self, session: int) -> set[bytes]:
        """The names of a session's media."""
        with self.state.locked():
            return self._keys(session)

    def file(self, session: int, key: bytes) -> bytes | None:
        """What was sent; None: it is not kept, or is damaged."""
        with self.state.locked():
            rows = self.state.catalog.sealed("media", "session = ? AND key = ?", (session, key))
        return self._read(rows[0]) if rows else None

    def files(self, session: int, first: bytes) -> Iterator[bytes]:
        """All of a session, the one of the name `first` before the others."""
        for key in sorted(self.keys(session), key=lambda key: key != first):
            if (found := self.file(session, key)) is not None:
                yield found

    def keep(self, session: int, media: Sequence[SentMedium], now: float) -> None:
        """Keep those that a session does not have, durably, inside a transaction: one that fails leaves files, which
        `sweep` removes. Raises DiskFull or StoreError."""
        for each in _new(media, self._keys(session) if media else set()):
            name = secrets.token_hex(16)
            self._write(name, memoryview(each.file))
            digest = _digest(each.file)
            facts = {"key": each.key, "name": name, "digest": digest, "created": now}
            self.state.catalog.insert("media", session=session, **facts)

    def sweep(self) -> int:
        """Delete the files that no session has; returns the bytes freed."""
        # A transaction, so that no process is between a file and its row.
        with self.state.locked(), self.state.catalog.transaction():
            known = {name for (name,) in self.state.catalog.rows("SELECT name FROM media")}
            return sum(remove_file(path) for path in self._paths() if path.name not in known)

    def problems(self) -> list[str]:
        """What is damaged or missing."""
        with self.state.locked():
            rows = self.state.catalog.sealed("media", "1", ())
        lost = [row for row in rows if self._read(row) is None]
        with self.state.locked():
            there = {name for (name,) in self.state.catalog.rows("SELECT name FROM media")}
        return [
            f"media/{row['name']}: a picture or sound is damaged or missing"
            for row in lost
            if row["name"] in there
        ]

    def _keys(self, session: int) -> set[bytes]:
        rows = self.state.catalog.rows("SELECT key FROM media WHERE session = ?", (session,))
        return {key for (key,) in rows}

    def _paths(self) -> list[Path]:
        with suppress(FileNotFoundError):
            return list(self.state.directory.media.iterdir())
        return []

    def _write(self, name: str, data: memoryview) -> None:
        of, folder = self.state.directory, self.state.directory.media
        with durable.store_errors("a picture or sound cannot be kept"):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
                durable.sync_dir(folder.parent)
            with of.files.create(of.tmp / name, folder / name, len(data)) as file:
                file.write(data, 0)

    def _read(self, row: dict[str, Any]) -> bytes | None:
        with suppress(OSError, StateError):
            data = bytes(self.state.directory.files.read(self.state.directory.media / row["name"]))
            if _digest(data) == row["digest"]:
                return data
        return None


def forget_media(catalog: Catalog, session: int) -> None:
    """Delete those of a session, inside the transaction that deletes it; the next gc removes the files."""
    catalog.run("DELETE FROM media WHERE session = ?", (session,))


def _new(media: Iterable[SentMedium], known: set[bytes]) -> Iterator[SentMedium]:
    for each in media:
        if each.key not in known and 0 < len(each.file) <= FILE_BYTES_MAX:
            known.add(each.key)
            yield each


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
