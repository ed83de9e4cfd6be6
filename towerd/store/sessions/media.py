"""Pictures and sounds of sessions, as their clients sent them: with these they are evaluated again where their rows are
gone, and shown to who reads the conversation on another device.

    media/NAME    what a client sent; sessions of one tenant share it

The catalog says which media of which session are made of it. Their conversation does not need them: where the disk is full they
are not kept, and the oldest leave for `--disk-max`.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towerd.errors import StoreError
from towerd.slots.errors import StateError
from towerd.store.catalog.catalog import Catalog
from towerd.store.files import durable
from towerd.store.files.directory import remove_file
from towerd.store.state.state import StoreState
from towerd.store.tree.scope import tenant_of
from towerd.tokens import Ids, ids_bytes

log = logging.getLogger(__name__)

KEY_BYTES = 16
_GONE = "is damaged or missing"
_MAY_BE_WHOLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
"""Errors of the system's, after which a file may be read."""
FILE_BYTES_MAX = 32 << 20
"""Larger ones are not kept: their client has them."""


@dataclass(frozen=True, slots=True)
class SentMedium:
    """A medium of a prompt. `key`: of its ids; file: what it is made of; ordinal: which of the media that are made of that."""

    key: bytes
    file: bytes
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class KeptMedium:
    """A medium whose file is kept, under this name."""

    key: bytes
    ordinal: int
    name: str
    digest: bytes
    n_bytes: int


def medium_key(ids: Ids) -> bytes:
    """The name of the medium that these ids stand for, 16 bytes."""
    return file_digest(ids_bytes(ids))


@dataclass(frozen=True, slots=True)
class MediaTable:
    """The media of all sessions, by the session's row. Thread-safe."""

    state: StoreState

    def __post_init__(self) -> None:
        self.state.directory.limit.media_leave_by(self.trim)

    # --- reading --------------------------------------------------------------------------

    def session(self, id: str, scope: str, tokenizer: str = "") -> int | None:
        """The row of a session, by which the others are asked; None: there is none. tokenizer: the hex digest of
        another one than the served model's."""
        digest = bytes.fromhex(tokenizer) or self.state.identity.tokenizer_digest
        sql = (
            "SELECT pk FROM sessions JOIN tokenizers ON tokenizers.id = tokenizer"
            " WHERE (digest, scope, sessions.id) = (?, ?, ?)"
        )
        with self.state.locked():
            rows = self.state.catalog.rows(sql, (digest, scope, id))
        return rows[0][0] if rows else None

    def keys(self, session: int) -> set[bytes]:
        """The names of a session's media."""
        with self.state.locked():
            return set(_names(self.state.catalog, session))

    def entries(self, session: int) -> list[KeptMedium]:
        """Where the files of a session's media are."""
        with self.state.locked():
            rows = self.state.catalog.sealed("media", "session = ? ORDER BY id", (session,))
        return [_entry(row) for row in rows]

    def entry(self, session: int, key: bytes) -> KeptMedium | None:
        """Where a medium's file is; None: it is not kept."""
        with self.state.locked():
            rows = self.state.catalog.sealed("media", "session = ? AND key = ?", (session, key))
        return _entry(rows[0]) if rows else None

    def read(self, entry: KeptMedium) -> bytes | None:
        """What was sent; None: it is damaged or gone, or cannot be read now."""
        with suppress(OSError):
            return self._read(entry)
        return None

    def file(self, session: int, key: bytes) -> bytes | None:
        """What was sent; None: it is not kept, or is damaged."""
        entry = self.entry(session, key)
        return None if entry is None else self.read(entry)

    # --- keeping --------------------------------------------------------------------------

    @contextmanager
    def written(
        self, media: Sequence[SentMedium], scope: str, *, checks: bool = False
    ) -> Iterator[list[KeptMedium]]:
        """Write the files of turns, durably, before their transaction: nothing removes them inside the block, and if it fails
        they do not stay. What cannot be kept is left out. scope: of their session. checks: read those that are here
        already; damaged ones are written again"""
        found: list[KeptMedium] = []
        unused = set[str]()
        try:
            with ExitStack() as names:
                sent = [each for each in media if 0 < len(each.file) <= FILE_BYTES_MAX]
                digests = [file_digest(each.file) for each in sent]
                new = {digest: each.file for digest, each in zip(digests, sent, strict=True)}
                name_of: dict[bytes, str] = {}
                for digest, data in list(new.items()):
                    name = self._here(digest, len(data), scope, names, checks, unused)
                    if name is not None:
                        name_of[digest] = name
                        del new[digest]
                name_of |= self._written(new, names)
                for digest, each in zip(digests, sent, strict=True):
                    if name := name_of.get(digest):
                        kept = KeptMedium(each.key, each.ordinal, name, digest, len(each.file))
                        found.append(kept)
                yield found
        except BaseException:
            self._remove_unused(unused | {each.name for each in found})
            raise
        if unused:
            self._remove_unused(unused)

    # --- leaving --------------------------------------------------------------------------

    @contextmanager
    def leaving(self, session: int) -> Iterator[None]:
        """The session is deleted inside the block. Its files that no other one has are removed then."""
        with self.state.locked():
            names = set(_names(self.state.catalog, session).values())
        yield
        self._remove_unused(names)

    def orphans(self) -> list[Path]:
        """The files that no session has."""
        with suppress(FileNotFoundError):
            return self._unused(path.name for path in self.state.directory.media.iterdir())
        return []

    def sweep(self) -> tuple[int, int]:
        """Delete the files that no session has; returns how many, and the bytes freed."""
        orphans = self.orphans()
        return len(orphans), self._remove_unused(path.name for path in orphans)

    def trim(self, n_bytes: int) -> None:
        """Delete so many bytes at least: what no session has, as an import that was killed leaves it, and then the oldest
        files."""
        n_bytes -= self.sweep()[1]
        sql = "SELECT name, max(bytes) FROM media GROUP BY name ORDER BY max(created), name"
        gone = []
        with self.state.locked(), self.state.catalog.transaction():
            writing = self.state.catalog.writing()  # turns that come now rely on these: they stay
            for name, size in self.state.catalog.rows(sql):
                if n_bytes <= 0:
                    break
                if name in writing:
                    continue
                n_bytes -= size
                gone.append(name)
                self.state.catalog.run("DELETE FROM media WHERE name = ?", (name,))
        self._remove_unused(gone)

    def check(self, *, repair: bool) -> tuple[list[str], int]:
        """What is damaged, missing or cannot be read, in sentences. repair: what is damaged or missing is forgotten, so that it
        is kept when it is sent again, unless a turn that comes now relies on it; how many files were set aside."""
        found, n_set_aside = [], 0
        with self.state.locked():
            rows = self.state.catalog.sealed("media", "1", ())
        for entry in {row["name"]: _entry(row) for row in rows}.values():
            try:
                if self._read(entry) is not None:
                    continue
                what = _GONE
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
            with self.state.locked():  # a turn that comes now begins to rely on it before or after
                if not self._is_used(entry.name):
                    continue
                found.append(f"media/{entry.name}: a picture or sound {what}")
                if repair and what == _GONE and entry.name not in self.state.catalog.writing():
                    n_set_aside += self.state.directory.set_aside(self._path(entry.name))
                    self._forget(entry.name)
        return found, n_set_aside

    def _here(
        self,
        digest: bytes,
        n_bytes: int,
        scope: str,
        names: ExitStack,
        checks: bool,
        unused: set[str],
    ) -> str | None:
        """The name of a file of this content that the tenant has, which stays as long as `names`. Adds its others to
        `unused`, such as damaged ones."""
        catalog = self.state.catalog
        sql = (
            "SELECT DISTINCT name, scope FROM media JOIN sessions ON pk = session WHERE digest = ?"
        )
        with self.state.locked():
            rows = catalog.rows(sql, (digest,))
            known = {name for name, whose in rows if tenant_of(whose) == tenant_of(scope)}
            for name in known:  # inside: what is removed is chosen and deleted under the lock
                names.enter_context(catalog.being_written(name))
        unused |= known
        for name in known:
            with suppress(OSError):
                is_sized = self._path(name).stat().st_size == self._disk_size(n_bytes)
                entry = KeptMedium(b"", 0, name, digest, n_bytes)
                if is_sized and (not checks or self.read(entry) is not None):
                    unused.discard(name)
                    return str(name)
        return None

    def _written(self, files: Mapping[bytes, bytes], names: ExitStack) -> dict[bytes, str]:
        """The names of these files, by digest, which are durable and stay as long as `names`. What cannot be kept is left
        out."""
        of, done = self.state.directory, dict[bytes, str]()
        fits = not files or of.limit.make_room(sum(map(self._disk_size, map(len, files.values()))))
        try:
            for digest, data in files.items():
                if fits or of.limit.make_room(self._disk_size(len(data))):
                    name = secrets.token_hex(16)
                    names.enter_context(self.state.catalog.being_written(name))
                    self._write(name, memoryview(data))
                    done[digest] = name
        except StoreError as error:
            log.warning("a picture or sound is not kept", extra={"error": str(error)})
        try:
            with durable.store_errors("pictures and sounds cannot be kept"):
                for name in done.values():
                    durable.sync_file(self._path(name))
                if done:
                    durable.sync_dir(of.media)
        except StoreError as error:
            log.warning("pictures and sounds are not kept", extra={"error": str(error)})
            for name in done.values():
                remove_file(self._path(name))
            return {}
        return done

    def _write(self, name: str, data: memoryview) -> None:
        of, folder = self.state.directory, self.state.directory.media
        with durable.store_errors("a picture or sound cannot be kept"):
            durable.make_dir(folder)
            half, final = of.tmp / name, folder / name
            with of.files.create(half, final, len(data), is_durable=False) as file:
                file.write(data, 0)
        of.writes.add("catalog", len(data))  # as all that a conversation consists of

    def _disk_size(self, n_bytes: int) -> int:
        return self.state.directory.files.disk_size(n_bytes)

    def _read(self, entry: KeptMedium) -> bytes | None:
        """What was sent; None: it is damaged or gone. Raises OSError if it may be whole and cannot be read now."""
        try:
            data = bytes(self.state.directory.files.read(self._path(entry.name)))
        except StateError:
            return None
        except OSError as error:
            if error.errno in _MAY_BE_WHOLE:
                raise
            return None
        return data if file_digest(data) == entry.digest else None

    def _is_used(self, name: str) -> bool:
        with self.state.locked():
            return bool(self.state.catalog.rows("SELECT 1 FROM media WHERE name = ?", (name,)))

    def _forget(self, name: str) -> None:
        with self.state.locked(), self.state.catalog.transaction():
            self.state.catalog.run("DELETE FROM media WHERE name = ?", (name,))
        self._remove_unused([name])

    def _remove_unused(self, names: Iterable[str]) -> int:
        """Remove those of these files that no session has; returns the bytes freed."""
        listed = list(names)
        with self.state.locked():
            return sum(map(remove_file, self._unused(listed)))

    def _unused(self, names: Iterable[str]) -> list[Path]:
        """Those of these files that no session has."""
        listed = list(names)
        with self.state.locked():
            spared = {name for (name,) in self.state.catalog.rows("SELECT name FROM media")}
            spared |= set(
                self.state.catalog.writing()
            )  # after the list, and before what it says is entered
        return [self._path(name) for name in listed if name not in spared]

    def _path(self, name: str) -> Path:
        return self.state.directory.media / name


def enter_media(catalog: Catalog, session: int, media: Sequence[KeptMedium], now: float) -> None:
    """Enter the media of turns, inside their transaction. What the session has of them under another name may be damaged,
    and is replaced."""
    known = _names(catalog, session) if media else {}
    for each in media:
        if known.get(each.key) == each.name:
            continue
        if each.key in known:
            which = session, each.key
            catalog.run("DELETE FROM media WHERE session = ? AND key = ?", which)
        known[each.key] = each.name
        catalog.insert(
            "media",
            session=session,
            key=each.key,
            ordinal=each.ordinal,
            name=each.name,
            bytes=each.n_bytes,
            digest=each.digest,
            created=now,
        )


def forget_media(catalog: Catalog, session: int) -> None:
    """Delete those of a session, inside the transaction that deletes it."""
    catalog.run("DELETE FROM media WHERE session = ?", (session,))


def _names(catalog: Catalog, session: int) -> dict[bytes, str]:
    """The file of each medium of a session, by key."""
    return dict(catalog.rows("SELECT key, name FROM media WHERE session = ?", (session,)))


def _entry(row: dict[str, Any]) -> KeptMedium:
    return KeptMedium(row["key"], row["ordinal"], row["name"], row["digest"], row["bytes"])


def file_digest(data: bytes | memoryview) -> bytes:
    """What tells files apart, 16 bytes."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
