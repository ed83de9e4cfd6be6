"""What conversations take: which of their tokens resume without prefill, in which tier and for which model
their rows are, and how much more disk would save the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from towerd.store.rows.checkpoints import checkpoint_bytes, cut_of
from towerd.store.segments.checkpoint_file import ANYWHERE
from towerd.store.sessions.turn import TurnInfo
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node

_FROZEN = (
    "SELECT coalesce(sum(max(0, n_tokens - n_base)), 0) FROM sessions JOIN cold ON session = pk"
    " WHERE tokenizer = ? AND cold_bytes > 0"
)
_AT_ONCE = 500
"""Segments in one query."""


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """Tokens of all conversations; those that several share count once."""

    tokens_resumable: int
    """They resume from rows or a state checkpoint."""
    tokens_to_prefill: int
    """They have no rows that a prompt reaches: their rows had to leave, or never came."""
    token_bytes: float
    """Bytes on disk of a token's rows, in the formats that rows have now; native ones without any."""

    @property
    def bytes_wanted(self) -> int:
        """Disk that the rows of `tokens_to_prefill` would take."""
        return round(self.tokens_to_prefill * self.token_bytes)


def space(state: StoreState, has_checkpoint: Callable[[Node], bool] | None) -> SpaceReport:
    """Measure an open store; the lock is not held while its segments are counted, so that figures
    of a moment of change may be a little off. has_checkpoint: whether a state checkpoint is at a
    segment's end; None: the model resumes from any row."""
    nodes = sorted(state.tree.nodes.copy().values(), key=lambda node: node.p1)
    has_kv = bool(state.row_identity.layout.planes)
    reached = {state.tree.root.id}
    for node in nodes:
        if (not has_kv or node.has_rows) and node.parent is not None and node.parent.id in reached:
            reached.add(node.id)
    if has_checkpoint is not None:
        before: set[int] = set()
        for node in reversed(nodes):
            if node.id in before or has_checkpoint(node):
                before.add(node.id)
                before.add(node.parent.id if node.parent is not None else 0)
        reached &= before
    n_all = sum(node.n for node in nodes)
    n_reached = sum(node.n for node in nodes if node.id in reached)
    with state.lock:
        ((n_frozen,),) = state.catalog.rows(_FROZEN, (state.identity.tokenizer,))
    n_stored = sum(node.n for node in nodes if node.file is not None)
    native = state.row_identity.layout.token_bytes if has_kv else 0
    token_bytes = state.warm_bytes / n_stored if n_stored else float(native)
    return SpaceReport(n_reached, n_all - n_reached + n_frozen, token_bytes)


@dataclass(frozen=True, slots=True)
class TierCost:
    """The current branch of a session, for the served model."""

    hot_bytes: int
    """Native rows in RAM."""
    warm_bytes: int
    """Rows in files."""
    state_bytes: int
    """State checkpoints."""
    shared_tokens: int
    """Leading tokens that other conversations, or branches, continue from."""
    resumable_tokens: int
    """Leading tokens that need no evaluation."""
    pinned: bool
    branches: int
    """The current one, and those that were left."""


def tier_cost(state: StoreState, end: int, branches: int) -> TierCost:
    """The cost of the session whose current branch ends with the segment `end`. Rows that are shared count in
    full for each."""
    with state.locked():
        node = state.tree.nodes.get(end)
        path = [] if node is None else node.path()
        hot_bytes = sum(each.hot.nbytes for each in path if each.hot is not None)
    anywhere = cut_of(state) == ANYWHERE
    states = [0 if anywhere else checkpoint_bytes(state, each) for each in path]
    return TierCost(
        hot_bytes=hot_bytes,
        warm_bytes=sum(_file_bytes(each) for each in path),
        state_bytes=sum(states),
        shared_tokens=max((each.p1 for each in path if len(each.children) > 1), default=0),
        resumable_tokens=_resumable(path, states, anywhere),
        pinned=bool(path) and path[-1].pinned,
        branches=branches,
    )


def _file_bytes(node: Node) -> int:
    """A node's part of the file that its rows are in."""
    file = node.file
    return 0 if file is None else file.nbytes * node.n // file.n_rows


def _resumable(path: Sequence[Node], states: Sequence[int], anywhere: bool) -> int:
    """Where the first gap in the rows is; for a model that resumes at state checkpoints alone, the
    last of them."""
    if not anywhere:
        ends = [node.p1 for node, n_bytes in zip(path, states, strict=True) if n_bytes]
        return max(ends, default=0)
    return next((node.p0 for node in path if not node.has_rows), path[-1].p1 if path else 0)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """How much of a conversation one model need not evaluate again."""

    fingerprint: str
    """Hex digest of the row identity; so named by clients."""
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
    own = state.identity.row_identity
    holders[own] |= {node.id for node in path if node.hot is not None}
    found = []
    for known in state.catalog.row_identities():
        held = holders.get(known.pk, set())
        n_tokens = next((node.p0 for node in path if node.id not in held), path[-1].p1)
        if n_tokens:
            row_identity = known.row_identity
            layout = row_identity.layout
            types = [planes[0].format.name if planes else "none" for planes in (layout.k, layout.v)]
            found.append(
                StoredRows(
                    row_identity.digest().hex(),
                    row_identity.model_hash,
                    row_identity.arch,
                    "/".join(types),
                    n_tokens,
                    known.pk == own,
                )
            )
    return sorted(found, key=lambda each: not each.is_served)
