"""What is forgotten at once: conversations of a tenant, those unused for long, and what else the store has of these."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.store.sessions.bases import BaseTable
from towerd.store.sessions.responses import forget_responses, without_session
from towerd.store.state.state import StoreState, count_pins
from towerd.store.tree.scope import tenant_of

_SESSIONS = """
WITH RECURSIVE above(id) AS (
    SELECT node FROM pins
    UNION SELECT segments.parent FROM above JOIN segments USING (id) WHERE segments.parent IS NOT NULL
)
SELECT sessions.id, scope, digest, updated, n_tokens, EXISTS (
    SELECT 1 FROM turns WHERE session = sessions.pk AND (
        reply_node IN (SELECT node FROM pins) OR (turns.id = leaf AND reply_node IN above)))
FROM sessions JOIN tokenizers ON tokenizers.id = sessions.tokenizer ORDER BY updated
"""
"""A pin keeps a session that ends at it or above it, or had ended there when it was pinned."""
_PINNED_FOR = """
WITH RECURSIVE below(pin, id) AS (
    SELECT node, node FROM pins
    UNION SELECT pin, segments.id FROM below JOIN segments ON segments.parent = below.id
),
users(pin, session) AS (
    SELECT DISTINCT pin, session FROM below JOIN turns ON reply_node = below.id OR prompt_node = below.id
)
SELECT pin FROM users WHERE session IN (
    SELECT pk FROM sessions JOIN tokenizers ON tokenizers.id = sessions.tokenizer
    WHERE sessions.id = ? AND scope = ? AND digest = ?)
AND pin NOT IN (SELECT node FROM bases)
AND (SELECT count(*) FROM users AS other WHERE other.pin = users.pin) = 1
"""
"""The pins that keep what one session has and no other."""
_OF_TENANT = {
    "bases": ("SELECT scope, id FROM bases", "DELETE FROM bases WHERE id = ?"),
    "pins": (
        "SELECT scope, node FROM pins JOIN segments ON segments.id = node",
        "DELETE FROM pins WHERE node = ?",
    ),
    "workflows": ("SELECT scope, pk FROM workflows", "DELETE FROM workflows WHERE pk = ?"),
}
"""What is found by its scope, and deleted by its key."""


@dataclass(frozen=True, slots=True)
class ForgettableSession:
    """A session, and whether a pin keeps it."""

    id: str
    scope: str
    tokenizer: str
    """Hex digest."""
    n_tokens: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to be forgotten."""

    tenant: str | None
    """All of a tenant; None: of all tenants."""
    before: float | None
    """What was last used before then, unless it is pinned; None: whenever, pinned or not."""


def sessions_of(state: StoreState, chosen: Selection) -> list[ForgettableSession]:
    """Those of every tokenizer, the least recently used first."""
    with state.locked():
        rows = state.catalog.rows(_SESSIONS)
    return [
        ForgettableSession(id, scope, digest.hex(), n_tokens, bool(is_pinned))
        for id, scope, digest, updated, n_tokens, is_pinned in rows
        if chosen.tenant in (None, tenant_of(scope))
        if chosen.before is None or (updated < chosen.before and not is_pinned)
    ]


def unpin(state: StoreState, session: ForgettableSession) -> None:
    """Remove the pins that keep what this session has, and no other."""
    which = session.id, session.scope, bytes.fromhex(session.tokenizer)
    with state.locked(), state.catalog.transaction():
        pins = state.catalog.rows(_PINNED_FOR, which)
        if pins:
            state.catalog.run_many("DELETE FROM pins WHERE node = ?", pins)
    with state.locked():
        if pins:
            count_pins(state.catalog, state.tree)


def rest_of(state: StoreState, chosen: Selection) -> dict[str, int]:
    """How many `responses` and `conversations` no session has that are to be forgotten."""
    with state.locked():
        found = without_session(state.catalog, chosen.tenant, chosen.before)
    return {name: len(rows) for name, rows in found.items()}


def forget_rest(state: StoreState, bases: BaseTable, chosen: Selection) -> dict[str, int]:
    """Forget what no session has: responses and conversations; of a tenant that is forgotten as a whole also its bases,
    pins and workflows. Returns how many of each. Every step is durable when the next begins."""
    counts = forget_responses(state.catalog, state.locked, chosen.tenant, chosen.before)
    if chosen.tenant is None or chosen.before is not None:
        return counts
    with state.locked(), state.catalog.transaction():
        gone = {
            name: [row for row in state.catalog.rows(select) if tenant_of(row[0]) == chosen.tenant]
            for name, (select, _) in _OF_TENANT.items()
        }
        for name, (_, delete) in _OF_TENANT.items():
            if gone[name]:
                state.catalog.run_many(delete, [row[1:] for row in gone[name]])
    with state.locked():
        bases.version += 1
        count_pins(state.catalog, state.tree)
    return counts | {name: len(rows) for name, rows in gone.items()}
