"""Reads what the catalog keeps of a session in coded form, checked; of any tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from towerd.store.catalog.catalog import Catalog
from towerd.store.sessions.cold_row import row_digest
from towerd.store.sessions.frozen import FrozenSession, damaged_session
from towerd.store.sessions.sessions import SessionRow, SessionTable
from towerd.store.sessions.turn import Base
from towerd.store.state.state import StoreState
from towerd.store.tree.scope import TENANT_SQL
from towerd.tokens import ids_array

_FACTS = ("id", "parent", "n_prompt", "n_reply", "n_cached", "started", "created", "finished")

_PAGE = (
    "SELECT pk, id, scope FROM cold JOIN sessions ON pk = session"
    " WHERE tokenizer = ?1 AND session > ?2"
    f" AND (?3 IS NULL OR ?3 IN (scope, {TENANT_SQL})) ORDER BY session LIMIT ?4"
)
_PREFIX_HASHES = (
    "SELECT session, marks FROM cold JOIN sessions ON pk = session"
    " WHERE frozen = 1 AND tokenizer = ?1 AND (?2 IS NULL OR session = ?2)"
)


@dataclass(frozen=True, slots=True)
class CodedSession:
    """A session that has a blob, be it frozen or not."""

    pk: int
    """Its row, by which sessions are gone through."""
    id: str
    scope: str


def coded_page(
    catalog: Catalog, tokenizer: int, after: int, limit: int, scope: str | None
) -> list[CodedSession]:
    """Sessions of a tokenizer, of one tenant or scope or of all, that have a blob, in order of their
    rows, which follow row `after`. Runs under the lock."""
    return [CodedSession(*row) for row in catalog.rows(_PAGE, (tokenizer, after, scope, limit))]


def prefix_hash_rows(state: StoreState, session: int | None = None) -> list[tuple[int, bytes]]:
    """(row, prefix hashes as they are stored) of the frozen session of this row, or of all, of the
    open tokenizer. Runs under the lock."""
    return state.catalog.rows(_PREFIX_HASHES, (state.identity.tokenizer, session))


def read_coded(
    table: SessionTable,
    session: SessionRow,
    prefix: Callable[[int], bytes],
    bases: Callable[[str], list[Base]],
    *,
    frozen: bool,
) -> FrozenSession | None:
    """A frozen session, or the copy of one that is not; None if there is none. `prefix`: the ids
    (int32 LE) from the root to the end of a segment, empty if it is gone; `bases`: what sessions of
    a scope may begin with. Raises ThawError if it is damaged. Runs under the lock."""
    sealed, pk = table.catalog.sealed, (session.pk,)
    rows = sealed("cold", "session = ? AND frozen = ?", (*pk, int(frozen)))
    blobs = sealed("blobs", "session = ?", pk)
    if not rows or not blobs:
        return None
    turns, marks, digest = (rows[0][name] for name in ("turns", "marks", "digest"))
    base, n_base, blob = rows[0]["base"], rows[0]["n_base"], blobs[0]["blob"]
    ids = ids_array(b"" if base is None else prefix(base))
    if n_base != len(ids) or row_digest(n_base, turns, marks, blob) != digest:
        raise damaged_session(session.id, "the checksum of its coded tokens does not match")
    stored = sealed("turns", "session = ? ORDER BY id", pk)
    facts = [tuple(turn[name] for name in _FACTS) for turn in stored]
    info = table.info(session)
    return FrozenSession(session, info, ids, turns, blob, facts, bases(info.scope), digest)
