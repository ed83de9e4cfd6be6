"""What a conversation takes in each tier, and how much of it resumes without evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towerd.store.rows.checkpoints import checkpoint_bytes, cut_of
from towerd.store.segments.checkpoint_file import ANYWHERE
from towerd.store.sessions.turn import TurnInfo
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node


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


def tier_cost(state: StoreState, turns: Sequence[TurnInfo]) -> TierCost:
    """The cost of the session with these turns. Rows that are shared count in full for each."""
    leaf = next((turn.reply_node for turn in reversed(turns) if turn.current), 0)
    with state.locked():
        node = state.tree.nodes.get(leaf)
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
