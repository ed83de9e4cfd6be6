"""Sessions that were unused for some time, page by page, and what idle time can do for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from towerd.store.rows.checkpoint_check import is_checkpointed_elsewhere
from towerd.store.rows.prune import OtherUsers, own_nodes, unneeded
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node

Place: TypeAlias = tuple[float, int]
"""(last use, row id) of a session, by which pages are ordered."""
START: Place = (-1e300, 0)

_PAGE = (
    "SELECT s.updated, s.pk, s.id, s.scope, c.session, c.base, t.reply_node"
    " FROM sessions s INDEXED BY sessions_warm JOIN turns t ON t.id = s.leaf"
    " LEFT JOIN cold c ON c.session = s.pk"
    " WHERE s.tokenizer = ? AND s.cold_bytes = 0 AND (s.updated, s.pk) > (?, ?)"
    " AND s.updated < ? ORDER BY s.updated, s.pk LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class IdleSession:
    """A session that has its tokens and is unused."""

    place: Place
    id: str
    scope: str
    has_copy: bool
    """Whether its coded copy has all its turns."""
    has_rows: bool
    """Whether its end, or anything that no other session needs, has rows; True without a copy."""


def idle_page(
    state: StoreState,
    before: float,
    after: Place,
    limit: int,
    holds: Callable[[Node], bool],
) -> list[IdleSession]:
    """At most `limit` sessions with tokens, last used before a Unix time, that follow `after`; the
    least recently used first. `holds`: whether a segment has rows, in RAM or on disk. The lock is
    released between sessions, of which a long one takes more than a millisecond."""
    with state.locked():
        rows = state.catalog.rows(_PAGE, (state.identity.tokenizer, *after, before, limit))
    found = []
    for updated, pk, id, scope, copied, base, leaf in rows:
        has_rows = True
        if copied is not None:
            with state.locked():
                has_rows = _has_rows(state, pk, leaf, base, holds)
        found.append(IdleSession((updated, pk), id, scope, copied is not None, has_rows))
    return found


def _has_rows(
    state: StoreState,
    session: int,
    leaf: int | None,
    base: int | None,
    holds: Callable[[Node], bool],
) -> bool:
    """Mostly the end of the current branch tells; what freezing would remove is looked for only
    where rows have begun to leave."""
    nodes = state.tree.nodes
    end = nodes.get(leaf or 0)
    if end is not None and (holds(end) or is_viewed(state, end)):
        return True
    own = own_nodes(state, session)
    if not any(holds(node) or is_viewed(state, node) for node in own):
        return False
    doomed = unneeded(OtherUsers(state, session), own, nodes.get(base or 0))
    return any(holds(node) or is_viewed(state, node) for node in doomed)


def is_viewed(state: StoreState, node: Node) -> bool:
    """Whether any model has rows of a segment on disk, or another one a state checkpoint at its end:
    those of others stay until their space is needed, too."""
    rows = state.catalog.rows("SELECT 1 FROM views WHERE node = ? LIMIT 1", (node.id,))
    return bool(rows) or is_checkpointed_elsewhere(state, node)
