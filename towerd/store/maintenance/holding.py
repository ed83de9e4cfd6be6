"""What one conversation holds: its rows by layer, and what would be free without it."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.slots.layout import NATIVE, KVLayout
from towerd.store.rows.checkpoints import checkpoint_bytes
from towerd.store.rows.collect import OtherUsers, own_nodes, unneeded
from towerd.store.segments.coded_format import is_coded
from towerd.store.sessions.turn import SessionInfo
from towerd.store.state.state import StoreState
from towerd.store.tree.scope import is_public

_SESSION = "SELECT pk FROM sessions WHERE tokenizer = ? AND scope = ? AND id = ?"
_END = "SELECT coalesce(reply_node, prompt_node, 0) FROM turns WHERE id = ?"


@dataclass(frozen=True, slots=True)
class Freed:
    """What a session alone needs, of all its branches."""

    tokens: int
    hot_bytes: int
    """Native rows in RAM."""
    warm_bytes: int
    """Rows in files. A file that others need in part is rewritten only when it is stored anew."""
    state_bytes: int
    """State checkpoints."""
    cold_bytes: int
    """Coded tokens."""


def freed_by_deleting(state: StoreState, info: SessionInfo, *, with_public: bool) -> Freed:
    """What the next gc frees if a session of the served model's tokenizer is deleted. with_public: whether public
    segments count, of which a tenant is not told whether others need them."""
    with state.locked():
        rows = state.catalog.rows(_SESSION, (state.identity.tokenizer, info.scope, info.id))
        doomed = [
            node
            for (pk,) in rows
            for node in unneeded(OtherUsers(state, pk), own_nodes(state, pk), None)
            if with_public or not is_public(node.scope)
        ]
        hot_bytes = sum(node.hot.nbytes for node in doomed if node.hot is not None)
    return Freed(
        tokens=sum(node.n for node in doomed),
        hot_bytes=hot_bytes,
        warm_bytes=sum(
            node.file.nbytes * node.n // node.file.n_rows
            for node in doomed
            if node.file is not None
        ),
        state_bytes=sum(checkpoint_bytes(state, node) for node in doomed),
        cold_bytes=info.cold_bytes,
    )


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What the rows of one layer of the cache take. `window`: it is in the cache of the sliding window."""

    layer: int
    k_bytes: int
    v_bytes: int
    window: bool


def layer_bytes(state: StoreState, info: SessionInfo) -> list[LayerBytes]:
    """What the rows of a session's current branch take by layer: those on disk in their formats, others in RAM.
    A transform coding is divided among layers as native rows are, since it is of all together."""
    layout = state.row_identity.layout
    k, v = [0.0] * layout.n_layer, [0.0] * layout.n_layer
    with state.locked():
        end = state.catalog.rows(_END, (info.leaf or 0,))
        node = state.tree.nodes.get(end[0][0]) if end else None
        for each in [] if node is None else node.path():
            parts = list(state.parts(each))
            if not parts and each.hot is not None:
                parts = [(NATIVE, each.n, each.n * layout.token_bytes)]
            for name, n, n_bytes in parts:
                stored = layout if is_coded(name) else layout.stored_as(name)
                scale = n_bytes / stored.token_bytes if is_coded(name) else float(n)
                _add(k, v, stored, scale)
    n_full = layout.n_layer - layout.n_window
    v = v or [0.0] * layout.n_layer
    return [
        LayerBytes(i, round(k[i]), round(v[i]), i >= n_full and layout.n_window > 0)
        for i in range(layout.n_layer)
    ]


def _add(k: list[float], v: list[float], layout: KVLayout, scale: float) -> None:
    for sums, planes in ((k, layout.k), (v, layout.v)):
        for i, plane in enumerate(planes):
            sums[i] += scale * plane.row_bytes
