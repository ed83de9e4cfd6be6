"""How many stored tokens resume without prefill, and how much more disk would save the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node

_FROZEN = (
    "SELECT coalesce(sum(max(0, n_tokens - n_base)), 0) FROM sessions JOIN cold ON session = pk"
    " WHERE tokenizer = ? AND cold_bytes > 0"
)


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
    has_kv = bool(state.fingerprint.layout.planes)
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
    native = state.fingerprint.layout.token_bytes if has_kv else 0
    token_bytes = state.warm_bytes / n_stored if n_stored else float(native)
    return SpaceReport(n_reached, n_all - n_reached + n_frozen, token_bytes)
