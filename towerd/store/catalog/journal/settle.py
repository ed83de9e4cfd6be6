"""Restoring the consistency of a catalog merged from two damaged copies.

Lost data stays visibly missing: a turn without its segments keeps its lengths, so that
serving it raises an error and never yields other tokens. A segment is kept only if its key
is that of its whole prefix.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from towerd.store.catalog import lost_tokenizers
from towerd.store.segments.keys import segment_key
from towerd.store.tree.scope import public_of

_PREFIX_LOST = {("segments", "parent")}
"""References in which NULL means the root, which would be another prefix."""


def settle(db: sqlite3.Connection, vocabularies: Path) -> tuple[str, ...]:
    """Remove or empty references to missing rows, inside a transaction. Returns a description
    of what is lost. `vocabularies`: the folder of those that are kept, which tell of tokenizers."""
    n_sessions = _count(
        db, "SELECT count(*) FROM (SELECT pk FROM sessions UNION SELECT session FROM turns)"
    )
    n_unknown = lost_tokenizers.restore(db, vocabularies)
    drop_wrong(db)
    found = {
        "tokenizers, whose conversations are listed until their model is served": n_unknown,
        "sessions": n_sessions - _count(db, "SELECT count(*) FROM sessions"),
        "turns without their tokens": _count(
            db,
            "SELECT count(*) FROM turns LEFT JOIN cold ON cold.session = turns.session"
            " AND frozen = 1 WHERE reply_node IS NULL AND n_cached > 0 AND cold.session IS NULL",
        ),
        "sessions without their last turn": _count(
            db, "SELECT count(*) FROM sessions WHERE leaf IS NULL AND n_tokens > 0"
        ),
        "frozen sessions without their tokens": _count(
            db,
            "SELECT count(*) FROM sessions LEFT JOIN blobs ON session = pk"
            " WHERE cold_bytes > 0 AND session IS NULL",
        ),
    }
    lost = [f"{n:,} {what}" for what, n in found.items() if n]
    return tuple(lost or ["perhaps a few changes that nothing tells of"])


def drop_wrong(db: sqlite3.Connection) -> None:
    """Remove segments that are not where they should be, and references to missing rows."""
    _cut_dangling(db)
    while _drop_wrong_segments(db):
        _cut_dangling(db)


def dangling(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """(table, row, referenced table, reference number) of every reference to a missing row."""
    return db.execute("PRAGMA foreign_key_check").fetchall()


def _cut_dangling(db: sqlite3.Connection) -> None:
    """Empty references to missing rows, or remove rows that are meaningless without them."""
    while rows := dangling(db):
        for table, row, _, number in rows:
            references = db.execute(f"PRAGMA foreign_key_list({table})").fetchall()
            column = next(each[3] for each in references if each[0] == number)
            info = db.execute(f"PRAGMA table_info({table})")
            needed = {name for _, name, _, not_null, _, key in info if not_null or key}
            if column in needed or (table, column) in _PREFIX_LOST:
                db.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
            else:
                db.execute(f"UPDATE {table} SET {column} = NULL WHERE rowid = ?", (row,))


def _count(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _drop_wrong_segments(db: sqlite3.Connection) -> int:
    """Remove segments whose key does not match their prefix or that begin like a sibling;
    returns how many. The keys of an unknown tokenizer are checked once it is known."""
    digests = dict(db.execute("SELECT id, digest FROM tokenizers"))
    known = {pk for (pk,) in db.execute("SELECT id FROM tokenizers WHERE pieces != ''")}
    children: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    every = set()
    for row in db.execute(
        "SELECT tokenizer, coalesce(parent, 0), id, scope, p0, p1, key, ids FROM segments"
        " ORDER BY p1 DESC, id"
    ):
        children.setdefault(row[:2], []).append(row[2:])
        every.add(row[2])
    right = set()
    stack = [(pk, 0, "public", b"") for pk in digests]
    while stack:
        pk, parent, above, prefix = stack.pop()
        places = set()
        for id, scope, p0, p1, key, ids in children.get((pk, parent), ()):
            whole = prefix + ids
            place = scope, ids[:4]
            is_right = 4 * p0 == len(prefix) and 4 * p1 == len(whole) and place not in places
            is_right = is_right and (not parent or above in (public_of(scope), scope))
            if is_right and (pk not in known or segment_key(digests[pk], scope, whole) == key):
                places.add(place)
                right.add(id)
                stack.append((pk, id, scope, whole))
    db.executemany("DELETE FROM segments WHERE id = ?", [(id,) for id in every - right])
    return len(every - right)
