"""Sessions and turns whose row ids were used again, in a catalog that is rebuilt past lost changes.

SQLite gives the highest row id away again after a deletion. If the record of the deletion is lost, what
was left of a deleted session would become the next one's, which may be another tenant's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from towerd.store.catalog.journal.tables import Table, TableChange
from towerd.store.tree.node import PUBLIC
from towerd.store.tree.scope import tenant_of

_OF_SESSIONS = frozenset(("turns", "cold", "blobs", "responses", "conversation_items", "media"))
"""Tables whose rows belong to the session that their column `session` names."""
_REPLACED = (
    "SELECT pk FROM sessions WHERE pk = :pk"
    " AND (tokenizer, scope, id, created) IS NOT (:tokenizer, :scope, :id, :created)"
    " UNION SELECT pk FROM sessions"
    " WHERE pk != :pk AND (tokenizer, scope, id) = (:tokenizer, :scope, :id)"
)
_CONVERSATIONS = (
    "SELECT DISTINCT conversation FROM conversation_items WHERE session = ? AND created < ?"
)
_HIDE_RESPONSES = (
    "UPDATE responses SET hidden = 1, session = NULL WHERE session = ? AND created < ?"
)
_UNNEEDED_RESPONSES = (
    "DELETE FROM responses WHERE hidden = 1 AND NOT EXISTS"
    " (SELECT 1 FROM responses AS each WHERE each.parent = responses.id)"
)
_FOREIGN_SEGMENT = """
    SELECT 1 FROM segments, sessions WHERE segments.id IN (prompt_node, reply_node)
    AND pk = session AND (segments.tokenizer != sessions.tokenizer
        OR tenant_of(segments.scope) NOT IN (:public, tenant_of(sessions.scope)))
"""
_PARENT_ELSEWHERE = (
    "EXISTS (SELECT 1 FROM turns AS before WHERE before.id = turns.parent"
    " AND before.session != turns.session)"
)
_ONLY_TAIL = "prompt_node IS NULL AND reply_node IS NULL AND tail != x''"
_SCOPE_OF_ITEM = "SELECT scope FROM conversations WHERE conversations.id = conversation"
_FORGET_FOREIGN_SESSIONS = [
    f"UPDATE {table} SET session = NULL WHERE tenant_of(({scope}))"
    f" != (SELECT tenant_of(scope) FROM sessions WHERE pk = {table}.session)"
    for table, scope in (("responses", "scope"), ("conversation_items", _SCOPE_OF_ITEM))
]
_LEAF_ELSEWHERE = "EXISTS (SELECT 1 FROM turns WHERE turns.id = leaf AND turns.session != pk)"


def forget_replaced(
    db: sqlite3.Connection, tables: Mapping[str, Table], changes: Sequence[TableChange]
) -> None:
    """Remove what is left of the sessions that others replace in this transaction, before it is applied."""
    digests = {row["session"]: row["digest"] for row in _rows_of("cold", tables, changes)}
    for row in _rows_of("sessions", tables, changes):
        for (pk,) in db.execute(_REPLACED, row).fetchall():
            _forget(db, pk, row["created"], digests.get(pk))


def _forget(db: sqlite3.Connection, pk: int, since: float, digest: bytes | None) -> None:
    """Delete the rows of a session of which nothing tells that it was deleted. since: when the one that
    replaces it was made; digest: of the blob that the transaction says that one has."""
    db.execute("DELETE FROM turns WHERE session = ?", (pk,))
    # a blob was entered without its session, so it may have been the new one's from the start
    if db.execute("SELECT digest FROM cold WHERE session = ?", (pk,)).fetchall() != [(digest,)]:
        db.execute("DELETE FROM blobs WHERE session = ?", (pk,))
        db.execute("DELETE FROM cold WHERE session = ?", (pk,))
    which = pk, since  # a response, too, is entered without its session
    db.execute("DELETE FROM media WHERE session = ? AND created < ?", which)
    for conversation in db.execute(_CONVERSATIONS, which).fetchall():
        db.execute("UPDATE responses SET conversation = NULL WHERE conversation = ?", conversation)
        db.execute("DELETE FROM conversation_items WHERE conversation = ?", conversation)
        db.execute("DELETE FROM conversations WHERE id = ?", conversation)
    db.execute(_HIDE_RESPONSES, which)


def drop_foreign(db: sqlite3.Connection) -> None:
    """Remove turns and copies that may be another session's than the one that they name, and references
    to another session's turns. References to what is removed are left dangling."""
    db.create_function("tenant_of", 1, tenant_of, deterministic=True)
    try:
        db.execute(f"DELETE FROM turns WHERE EXISTS ({_FOREIGN_SEGMENT})", {"public": PUBLIC})
        db.execute(f"DELETE FROM turns WHERE {_ONLY_TAIL} AND {_PARENT_ELSEWHERE}")
        db.execute(f"UPDATE turns SET parent = NULL WHERE {_PARENT_ELSEWHERE}")
        db.execute(f"UPDATE sessions SET leaf = NULL WHERE {_LEAF_ELSEWHERE}")
        for statement in _FORGET_FOREIGN_SESSIONS:
            db.execute(statement)
    finally:
        db.create_function("tenant_of", 1, None)
    # which session a copy was made of is in no record; it is made again
    copies = "SELECT session FROM cold WHERE frozen = 0"
    db.execute(f"DELETE FROM blobs WHERE session IN ({copies})")
    db.execute("DELETE FROM cold WHERE frozen = 0")
    while db.execute(_UNNEEDED_RESPONSES).rowcount > 0:
        pass


class KnownSessions:
    """Which sessions a damaged catalog tells of, of rows that are read from it: sessions, then turns, then
    the others."""

    def __init__(self, db: sqlite3.Connection, tables: Mapping[str, Table]) -> None:
        """db: the catalog that is being rebuilt, which these rows are entered in."""
        self._db, self._tables = db, tables
        self._told: set[int] = set()

    def own(self, change: TableChange) -> TableChange:
        """The rows of a table, but for those of a session whose own row is unreadable, unless a turn that
        is in both catalogs proves that it is the same session in both."""
        if change.table == "sessions":
            at = self._tables["sessions"].key_at
            self._told = {row[at] for row in change.rows}
        if change.table == "turns":
            self._compare(change)
        if change.table not in _OF_SESSIONS:
            return change
        at = self._tables[change.table].columns.index("session")
        rows = [row for row in change.rows if row[at] is None or row[at] in self._told]
        return TableChange(change.table, rows, change.gone)

    def _compare(self, turns: TableChange) -> None:
        sql = "SELECT 1 FROM turns WHERE (id, session, started, created) = (?, ?, ?, ?)"
        for row in _rows_of("turns", self._tables, [turns]):
            facts = (row["id"], row["session"], row["started"], row["created"])
            if row["session"] not in self._told and self._db.execute(sql, facts).fetchall():
                self._told.add(row["session"])


def _rows_of(
    name: str, tables: Mapping[str, Table], changes: Iterable[TableChange]
) -> Iterator[dict[str, Any]]:
    for change in changes:
        if change.table == name:
            yield from (dict(zip(tables[name].columns, row, strict=True)) for row in change.rows)
