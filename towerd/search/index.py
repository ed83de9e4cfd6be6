"""The search index: an SQLite file beside the catalog, with what was said in every conversation.

It is derived data: it may be deleted at any time, and is then filled again. Several processes may
have it open. All that is entered is keyed by session and turn, so entering it twice is entering it
once.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from towerd.errors import DiskFull, StoreError, Unavailable
from towerd.search.file import (
    OpenFile,
    begin_anew,
    damaged,
    error_code,
    is_damage,
    open_file,
)
from towerd.store.files import durable
from towerd.store.files.writes import DailyWrites, WalMeter
from towerd.store.tree.scope import MARK

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

SNIPPET_TOKENS = 28
DAMAGED = "The search index is damaged and is being filled again: try in a minute"
_AT_ONCE = 400
"""Rows of one query's parameters."""
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_OF_TENANT = "(:scope IS NULL OR s.scope = :scope OR s.scope > :scope || '{0}' AND s.scope < :scope || '{1}')"
_WHOSE = _OF_TENANT.format(MARK, chr(ord(MARK) + 1))
CUT = "\u200b"
"""Zero-width space: separates characters in what is indexed, and is removed from what is shown."""
MARKS = "\x02", "\x03"
"""Begin and end of what matched, in a text that SQLite returns."""
TERMS_MAX = 32
_NO_MARKS = dict.fromkeys(map(ord, ("\0", *MARKS)), " ")
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff])"
)
_TERM = re.compile(r'"([^"]*)"|([^\s"]+)')
_WORD = re.compile(r"[^\W_]")


class SessionKey(NamedTuple):
    """A session of any tokenizer (the hex digest of its identity)."""

    tokenizer: str
    scope: str
    id: str


class Indexed(NamedTuple):
    """What the index has of a session."""

    created: float
    n_turns: int
    whole: int | None
    """The turn up to which all is one passage; None if each turn is one."""


@dataclass(frozen=True, slots=True)
class Passage:
    """What was said in one turn, and when (Unix time)."""

    turn: int
    said: float
    text: str
    is_whole: bool = False
    """Whether it is all that was said up to the turn, because the turns cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The best passage of a session. snippet: its text near the words, in runs of which every
    second one, from the second on, matched."""

    session: SessionKey
    created: float
    """Of the session that it is of: another one of this name may have taken its place."""
    turn: int
    said: float
    snippet: list[str]


class SearchIndex:
    """Thread-safe. Readers never wait for writers, of this process or another. Every method raises
    StoreError (DiskFull where the disk is), or Unavailable while the file is damaged."""

    def __init__(
        self, path: Path, writes: DailyWrites | None = None, vault: Vault | None = None
    ) -> None:
        """Open the file, or make it; a damaged one, or one of another version, is made anew. writes:
        where written bytes are counted; vault: the keys of an encrypted store."""
        self.path, self._vault = path, vault
        self._writes, self._meter = writes, WalMeter(path)
        self._writing, self._reading = threading.Lock(), threading.Lock()
        """Whoever takes both takes that of writing first."""
        self._is_damaged = False
        with durable.store_errors(f"the search index {path} cannot be opened"):
            try:
                self._writer, self._reader = self._open(), self._open()
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise StoreError(f"the search index {path} cannot be opened: {error}") from error

    def close(self) -> None:
        """Close the file."""
        with self._writing, self._reading:
            self._writer.db.close()
            self._reader.db.close()

    def repair(self) -> None:
        """Begin with an empty file if this one is damaged, and no other process has done so."""
        with self._writing, self._reading, self._guarded():
            if self._is_damaged:
                self._begin_anew()

    def renew_key(self) -> None:
        """Have nothing of the file need an earlier key of the store; an empty one takes its place if that fails."""
        with self._writing, self._reading, self._guarded():
            self._writer = self._current(self._writer)
            try:
                self._writer.renew_key()
                self._reopen()
                self._writer.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error:
                self._begin_anew()

    def _begin_anew(self) -> None:
        self._writer.db.close()
        self._reader.db.close()
        begin_anew(self.path, self._writer)
        self._reopen()
        self._is_damaged = False

    def _reopen(self) -> None:
        self._writer.db.close()
        self._reader.db.close()
        self._writer, self._reader = self._open(), self._open()

    def _open(self) -> OpenFile:
        return open_file(self.path, self._vault)

    # --- filling ---------------------------------------------------------------------------

    def add(
        self,
        key: SessionKey,
        created: float,
        passages: Sequence[Passage],
        question: str = "",
        *,
        anew: bool = False,
    ) -> bool:
        """Enter passages of a session that was created at `created`. Those of an earlier session of
        this name leave, with `anew` also its own; returns whether any did, see `scrub`. `question`
        becomes its title if it has none."""
        with self._changing() as db:
            known = db.execute(
                "SELECT pk, created FROM sessions WHERE (tokenizer, scope, id) = (?, ?, ?)", key
            ).fetchone()
            is_replaced = known is not None and (anew or known[1] != created)
            if is_replaced:
                _remove(db, known[0])
            if known is None or is_replaced:
                whole = next((each.turn for each in passages if each.is_whole), None)
                (pk,) = db.execute(
                    "INSERT INTO sessions(tokenizer, scope, id, created, question, whole)"
                    " VALUES (?, ?, ?, ?, ?, ?) RETURNING pk",
                    (*key, created, question, whole),
                ).fetchone()
            else:
                pk = known[0]
                db.execute(
                    "UPDATE sessions SET question = ? WHERE pk = ? AND question = ''",
                    (question, pk),
                )
            for each in passages:
                _insert(db, pk, key, each)
        return is_replaced

    def forget(self, keys: Iterable[SessionKey]) -> int:
        """Remove sessions, and return how many there were. Their words leave the file's bytes with
        the next `scrub`, of this process or a later one."""
        n = 0
        with self._changing() as db:
            for key in keys:
                rows = db.execute(
                    "SELECT pk FROM sessions WHERE (tokenizer, scope, id) = (?, ?, ?)", key
                ).fetchall()
                for (pk,) in rows:
                    _remove(db, pk)
                n += len(rows)
        return n

    def scrub(self) -> bool:
        """Overwrite what was removed since the last scrub, in the file and in its log; returns
        whether it is gone: not while another connection reads what was there before. Takes time if
        anything was removed: the words of a full-text index lie together with those of other texts,
        and all are written anew."""
        with self._writing, self._guarded():
            self._writer = self._current(self._writer)
            db = self._writer.db
            removals, scrubbed = db.execute("SELECT removals, scrubbed FROM scrubs").fetchone()
            if removals == scrubbed:
                return True
            db.execute("INSERT INTO words(words) VALUES ('optimize')")
            is_busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not is_busy:  # what another process removed meanwhile is still to be scrubbed
                db.execute("UPDATE scrubs SET scrubbed = max(scrubbed, ?)", (removals,))
        return not is_busy

    # --- reading ---------------------------------------------------------------------------

    def indexed(self, key: SessionKey) -> Indexed | None:
        """What the index has of a session."""
        with self._looking() as db:
            found = db.execute(
                "SELECT created, (SELECT count(*) FROM passages WHERE session = pk), whole"
                " FROM sessions WHERE (tokenizer, scope, id) = (?, ?, ?)",
                key,
            ).fetchone()
        return None if found is None else Indexed(*found)

    def turns(self, key: SessionKey) -> set[int]:
        """The turns of a session that are entered."""
        with self._looking() as db:
            rows = db.execute(
                "SELECT turn FROM passages p JOIN sessions s ON s.pk = p.session"
                " WHERE (tokenizer, scope, id) = (?, ?, ?)",
                key,
            ).fetchall()
        return {turn for (turn,) in rows}

    def keys(self, id: str | None = None) -> list[SessionKey]:
        """All sessions, or those with this id."""
        with self._looking() as db:
            rows = db.execute(
                "SELECT tokenizer, scope, id FROM sessions WHERE :id IS NULL OR id = :id",
                {"id": id},
            ).fetchall()
        return [SessionKey(*row) for row in rows]

    def questions(self, keys: Sequence[SessionKey]) -> dict[tuple[SessionKey, float], str]:
        """The first question of each session that is entered, by its name and when it was created."""
        found: dict[tuple[SessionKey, float], str] = {}
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            marks = ", ".join(["(?, ?, ?)"] * len(some))
            with self._looking() as db:
                rows = db.execute(
                    "SELECT tokenizer, scope, id, created, question FROM sessions"
                    f" WHERE (tokenizer, scope, id) IN (VALUES {marks})",
                    [part for key in some for part in key],
                ).fetchall()
            found |= {(SessionKey(*row[:3]), row[3]): row[4] for row in rows}
        return found

    def search(self, typed: str, scope: str | None, limit: int) -> list[Hit]:
        """The sessions of a tenant (None: of all) with a turn in which all that was typed occurs,
        the best match first."""
        query = expression(typed)
        if not query:
            return []
        best: dict[int, int] = {}
        with self._looking() as db:
            for row, session in db.execute(
                "SELECT words.rowid, p.session FROM words JOIN passages p ON p.rowid = words.rowid"
                f" JOIN sessions s ON s.pk = p.session WHERE {_WHOSE} AND words MATCH :query"
                " ORDER BY rank, said DESC",
                {"scope": scope, "query": query},
            ):
                best.setdefault(session, row)
                if len(best) == limit:
                    break
            return [_hit(db, row, query) for row in best.values()]

    def size(self) -> tuple[int, int]:
        """How many sessions are entered, and the bytes of the file."""
        with self._looking() as db:
            (n,) = db.execute("SELECT count(*) FROM sessions").fetchone()
            ((pages,), (page_bytes,)) = (
                db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
            )
        return n, int(pages) * int(page_bytes)  # SQLCipher says it in text

    # --- SQLite ----------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, in which one writer at a time is."""
        with self._writing, self._guarded():
            self._writer = self._current(self._writer)
            db = self._writer.db
            db.execute("BEGIN IMMEDIATE")
            self._meter.written()  # what others wrote is theirs to count
            try:
                yield db
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
            if self._writes is not None:
                self._writes.add("search", self._meter.written())

    @contextmanager
    def _looking(self) -> Iterator[sqlite3.Connection]:
        with self._reading, self._guarded():
            if self._is_damaged:
                raise Unavailable(DAMAGED)
            self._reader = self._current(self._reader)
            yield self._reader.db

    def _current(self, opened: OpenFile) -> OpenFile:
        """The connection; a new one if another process has begun the file anew, or renewed its key."""
        if not opened.is_replaced(self.path) and not opened.is_of_earlier_key():
            return opened
        opened.db.close()
        return self._open()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError) or is_damage(error):
                # another process may have renewed the key just then
                self._is_damaged = not (
                    self._writer.is_of_earlier_key() or self._reader.is_of_earlier_key()
                )
                raise Unavailable(DAMAGED) from error
            kind = DiskFull if error_code(error) in _FULL else StoreError
            raise kind(f"the search index {self.path} failed: {error}") from error


def _hit(db: sqlite3.Connection, row: int, query: str) -> Hit:
    found = db.execute(
        "SELECT s.tokenizer, s.scope, s.id, s.created, p.turn, p.said,"
        f" snippet(words, 0, char(2), char(3), '…', {SNIPPET_TOKENS}), p.text, p.seal"
        " FROM words JOIN passages p ON p.rowid = words.rowid JOIN sessions s ON s.pk = p.session"
        " WHERE words MATCH ? AND words.rowid = ?",
        (query, row),
    ).fetchone()
    key, (created, turn, said, snippet, text, seal) = SessionKey(*found[:3]), found[3:]
    if _seal(key, turn, said, text) != seal:
        raise damaged("a passage is not what was entered")
    return Hit(key, created, turn, said, _runs(snippet))


def _seal(key: SessionKey, turn: int, said: float, text: str) -> int:
    """The checksum of a passage and whose it is, which SQLite does not check: a signed integer."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((*key, turn, said, text))) - (1 << 63)


def _insert(db: sqlite3.Connection, session: int, key: SessionKey, passage: Passage) -> None:
    """Enter a passage, unless it is entered."""
    text = cut(passage.text)
    turn, said = passage.turn, float(passage.said)
    entered = db.execute(
        "INSERT OR IGNORE INTO passages(session, turn, said, text, seal) VALUES (?, ?, ?, ?, ?)",
        (session, turn, said, text, _seal(key, turn, said, text)),
    )
    if entered.rowcount:
        db.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (entered.lastrowid, text))


def _remove(db: sqlite3.Connection, session: int) -> None:
    db.execute(
        "INSERT INTO words(words, rowid, text)"
        " SELECT 'delete', rowid, text FROM passages WHERE session = ?",
        (session,),
    )
    db.execute("DELETE FROM passages WHERE session = ?", (session,))
    db.execute("DELETE FROM sessions WHERE pk = ?", (session,))
    db.execute("UPDATE scrubs SET removals = removals + 1")


def _runs(snippet: str) -> list[str]:
    """The snippet in runs; every second one, from the second on, matched."""
    return uncut(snippet).replace(MARKS[1], MARKS[0]).split(MARKS[0])


def cut(text: str) -> str:
    """The text with scripts that put no space between words cut into their characters, in texts and
    queries alike, and without MARKS."""
    return _UNSPACED.sub(rf"{CUT}\1{CUT}", text.translate(_NO_MARKS))


def uncut(text: str) -> str:
    """The text as it was."""
    return text.replace(CUT, "")


def expression(typed: str) -> str:
    """What people type, as the FTS5 query for all its terms; "" if it has no word.

    Words are found as whole words, the last one by its beginning, too, and words in quotes as a
    phrase. Nothing that is typed is a syntax error."""
    terms: list[str] = []
    begun = False
    for found in _TERM.finditer(typed):
        phrase, word = found[1], found[2]
        term = phrase if word is None else word
        if _WORD.search(term):
            terms.append(f'"{cut(term)}"')
            begun = word is not None and found.end() == len(typed)
    if not terms:
        return ""
    terms = terms[:TERMS_MAX]
    return " AND ".join(terms) + ("*" if begun else "")
