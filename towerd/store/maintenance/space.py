"""How many stored tokens resume without prefill, and how much more disk would save the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from towerd.store.prefix.node import Node
from towerd.store.state import StoreState

_FROZEN = (
    "SELECT coalesce(sum(max(0, n_tokens - n_base)), 0) FROM sessions JOIN cold ON session = pk"
    " WHERE fingerprint = ? AND cold_bytes > 0"
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
    """Measure an open store, under its lock. has_checkpoint: whether a state checkpoint is at a
    segment's end; None: the model resumes from any row."""
    has_kv = bool(state.fingerprint.layout.planes)
    found: list[tuple[Node, int]] = [(state.trie.root, 0)]
    is_reached = [True]
    for at, (node, _) in enumerate(found):  # grows meanwhile, parents before their children
        for child in node.children:
            found.append((child, at))
            is_reached.append(is_reached[at] and (child.has_rows or not has_kv))
    if has_checkpoint is not None:
        is_before = [has_checkpoint(node) for node, _ in found]
        for at in range(len(found) - 1, 0, -1):
            is_before[found[at][1]] |= is_before[at]
        is_reached = [a and b for a, b in zip(is_reached, is_before, strict=True)]
    n_all = sum(node.n for node, _ in found)
    n_reached = sum(node.n for (node, _), is_so in zip(found, is_reached, strict=True) if is_so)
    ((n_frozen,),) = state.catalog.rows(_FROZEN, (state.fingerprint_pk,))
    n_stored = sum(node.file_rows for node, _ in found)
    native = state.fingerprint.layout.token_bytes if has_kv else 0
    token_bytes = state.warm_bytes / n_stored if n_stored else float(native)
    return SpaceReport(n_reached, n_all - n_reached + n_frozen, token_bytes)
