"""What conversations take after each layer of the store: a slot file each, prefixes that are stored once,
block formats by level, the transform-coded format, and what is kept in the end.

Each layer counts what the layers above it left, with the bytes of those rows alone that it applies to:

    slot_bytes       native rows of every token of every conversation, one file each
    shared_bytes     native rows of every token once; not of a last one, which was never evaluated
    levels_bytes     ... of which those in block formats take what they take
    transform_bytes  ... and those in any other stored format, too
    kept_bytes       what there is: files with headers and padding, and token ids or coded text. Rows that
                     had to leave, or never came, take nothing
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.slotfile import slot_file_bytes
from towerd.store.sessions.turn import SessionInfo
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.store.tree.scope import is_public
from towerd.tokens import ID_BYTES

_CODED = (
    "SELECT coalesce(sum(max(0, n_tokens - n_base)), 0), coalesce(sum(cold_bytes), 0)"
    " FROM sessions JOIN cold ON session = pk WHERE tokenizer = ? AND cold_bytes > 0"
)
_SESSIONS = "SELECT count(*), coalesce(sum(n_tokens), 0) FROM sessions WHERE tokenizer = ?"


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The rows that are in one format."""

    format: str
    tokens: float
    """Of one conversation: its share of what others have, too."""
    bytes: float
    """Without headers and padding."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of all conversations, or of one, which has an equal share of what it has in common with others."""

    tokens: int
    slot_bytes: int
    shared_bytes: int
    levels_bytes: int
    transform_bytes: int
    kept_bytes: int
    text_bytes: int
    """Of `kept_bytes`: token ids, and the coded text of what is frozen."""
    formats: Sequence[StoredFormat]

    def to_json(self) -> dict[str, Any]:
        """As it is served, rounded to whole tokens and bytes."""
        formats = [
            {"format": each.format, "tokens": round(each.tokens), "bytes": round(each.bytes)}
            for each in self.formats
        ]
        return {**asdict(self), "formats": formats}


def total_footprint(state: StoreState) -> Footprint:
    """The footprint of the store for its model, with bases and branches that no conversation has any
    more. O(nodes), a few hundredths of a second at 100,000 conversations."""
    layout, pk = state.row_identity.layout, (state.identity.tokenizer,)
    with state.lock:
        ((n_sessions, n_tokens),) = state.catalog.rows(_SESSIONS, pk)
        ((n_coded, coded_bytes),) = state.catalog.rows(_CODED, pk)
        tally, nodes = state.formats, list(state.tree.nodes.values())
        formats = [
            StoredFormat(name, n, tally.nbytes[name]) for name, n in tally.n_rows.items() if n
        ]
        files_bytes = state.warm_bytes
    n_stored = sum(node.n for node in nodes)
    return _layered(
        n_tokens,
        _slot_bytes(layout, n_tokens, n_sessions),
        n_stored + n_coded,
        layout,
        formats,
        files_bytes,
        ID_BYTES * n_stored + coded_bytes,
    )


def session_footprints(
    state: StoreState,
    infos: Sequence[SessionInfo],
    ends: Mapping[int, int],
    n_sharers: Mapping[int, int],
    *,
    with_public: bool,
) -> Iterator[Footprint]:
    """The footprint of each session. ends: leaf turn -> the last segment of its branch, or of the base
    that its coded text continues; n_sharers: segment -> how many sessions begin with it; with_public:
    whether public segments count, whose number of users a tenant is not told."""
    for info in infos:
        with state.locked():
            end = state.tree.nodes.get(ends.get(info.leaf or 0, 0))
            path = [] if end is None else end.path()
            found = _footprint_of(state, info, path, n_sharers, with_public)
        yield found  # outside: who takes it may never ask for the next one


def _footprint_of(
    state: StoreState,
    info: SessionInfo,
    path: Sequence[Node],
    n_sharers: Mapping[int, int],
    with_public: bool,
) -> Footprint:
    layout = state.row_identity.layout
    n_own = n_ids = files_bytes = 0.0
    if info.cold_bytes:
        n_own = float(max(0, info.n_tokens - (path[-1].p1 if path else 0)))
    n_rows: dict[str, float] = defaultdict(float)
    nbytes: dict[str, float] = defaultdict(float)
    for node in path:
        if is_public(node.scope) and not with_public:
            continue
        share = 1 / max(1, n_sharers.get(node.id, 1))
        n_own += share * node.n
        n_ids += share * node.n
        if node.file is not None:
            files_bytes += share * node.file.nbytes * node.n / node.file.n_rows
        for name, n, n_bytes in state.parts(node):
            n_rows[name] += share * n
            nbytes[name] += share * n_bytes
    formats = [StoredFormat(name, n, nbytes[name]) for name, n in n_rows.items()]
    slot_bytes = _slot_bytes(layout, info.n_tokens, 1)
    text_bytes = ID_BYTES * n_ids + info.cold_bytes
    return _layered(info.n_tokens, slot_bytes, n_own, layout, formats, files_bytes, text_bytes)


def _layered(
    n_tokens: int,
    slot_bytes: int,
    n_once: float,
    layout: KVLayout,
    formats: Sequence[StoredFormat],
    files_bytes: float,
    text_bytes: float,
) -> Footprint:
    """n_once: tokens that are stored once, or the share of a conversation in them"""
    token_bytes = layout.token_bytes if layout.planes else 0
    shared_bytes = n_once * token_bytes

    def saved(is_block: bool) -> float:
        of_layer = (each for each in formats if each.format != NATIVE)
        return sum(
            each.tokens * token_bytes - each.bytes
            for each in of_layer
            if (each.format in BY_NAME) == is_block
        )

    levels_bytes = shared_bytes - saved(True)
    return Footprint(
        n_tokens,
        slot_bytes,
        round(shared_bytes),
        round(levels_bytes),
        round(levels_bytes - saved(False)),
        round(files_bytes + text_bytes),
        round(text_bytes),
        sorted(formats, key=lambda each: -each.bytes),
    )


def _slot_bytes(layout: KVLayout, n_tokens: int, n_sessions: int) -> int:
    """Slot files of so many tokens in all; the size of one is linear in its tokens."""
    if not n_tokens or not layout.planes:
        return 0
    token_bytes = slot_file_bytes(layout, 2) - slot_file_bytes(layout, 1)
    return n_tokens * token_bytes + n_sessions * (slot_file_bytes(layout, 1) - token_bytes)
