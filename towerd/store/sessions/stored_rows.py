"""For which models a conversation has rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from towerd.store.sessions.turn import TurnInfo
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node

_AT_ONCE = 500
"""Segments in one query."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """How much of a conversation one model need not evaluate again."""

    fingerprint: str
    """Hex digest of the row identity."""
    model_hash: str
    arch: str
    cache_types: str
    """The types of its K and V rows, such as `f16/f16`."""
    n_tokens: int
    """Leading tokens with rows."""
    is_served: bool


def stored_rows(state: StoreState, turns: Sequence[TurnInfo]) -> list[StoredRows]:
    """The row identities that have rows of the current branch of a session with these turns, the
    open one first, if it has any. Rows in memory count for it."""
    leaf = next((turn.reply_node for turn in reversed(turns) if turn.current), 0)
    with state.locked():
        node = state.tree.nodes.get(leaf)
        return [] if node is None else _rows_of(state, node.path())


def _rows_of(state: StoreState, path: list[Node]) -> list[StoredRows]:
    holders: dict[int, set[int]] = defaultdict(set)
    for start in range(0, len(path), _AT_ONCE):
        ids = [node.id for node in path[start : start + _AT_ONCE]]
        marks = ", ".join("?" * len(ids))
        for node_id, pk in state.catalog.rows(
            "SELECT node, fingerprint FROM views JOIN files ON files.id = file"
            f" WHERE node IN ({marks})",
            ids,
        ):
            holders[pk].add(node_id)
    own = state.identity.fingerprint
    holders[own] |= {node.id for node in path if node.hot is not None}
    found = []
    for known in state.catalog.fingerprints():
        held = holders.get(known.pk, set())
        n_tokens = next((node.p0 for node in path if node.id not in held), path[-1].p1)
        if n_tokens:
            fingerprint = known.fingerprint
            layout = fingerprint.layout
            types = [planes[0].format.name if planes else "none" for planes in (layout.k, layout.v)]
            found.append(
                StoredRows(
                    fingerprint.digest().hex(),
                    fingerprint.model_hash,
                    fingerprint.arch,
                    "/".join(types),
                    n_tokens,
                    known.pk == own,
                )
            )
    return sorted(found, key=lambda each: not each.is_served)
