"""A portable session: its turns and their tokens, without rows.

The tokens of a turn mostly begin with those of an earlier turn, so all are kept as one
stream: each turn names the earlier turn (its origin), the shared length, and adds the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from towerd.media_ids import spans_of, starts_of
from towerd.store.catalog.catalog import Catalog
from towerd.store.sessions.bases import BaseTable
from towerd.store.sessions.media import KeptMedium, enter_media, medium_key
from towerd.store.sessions.sessions import SessionRow, SessionTable, check_name, tokens_lost
from towerd.store.sessions.turn import PREFIX, Base, SessionInfo
from towerd.store.state.state import Growth, StoreState
from towerd.store.tree.node import Node
from towerd.store.tree.scope import public_of
from towerd.tokens import ID_BYTES, Ids, common_prefix, ids_array

MEDIA_MAX = 1 << 12
"""Maximum number of media that a history is exported with; the store's lock is held while they are entered."""
_TURN = (
    "id",
    "parent",
    "reply_node",
    "n_prompt",
    "n_reply",
    "n_cached",
    "started",
    "created",
    "finished",
    "tail",
)


@dataclass(frozen=True, slots=True)
class PastTurn:
    """One turn. Other turns are referred to by their index in the session, 0 for the oldest."""

    parent: int | None
    """The earlier turn that it continues."""
    origin: int
    """The earlier turn with the same first `n_shared` tokens; its own index if there is none."""
    n_shared: int
    n_prompt: int
    n_reply: int
    n_cached: int
    started: float
    created: float
    finished: bool

    @property
    def n(self) -> int:
        """Tokens of prompt and reply."""
        return self.n_prompt + self.n_reply


@dataclass(frozen=True, slots=True)
class NamedBase:
    """A precached prompt that begins the current branch."""

    name: str
    level: int
    n_tokens: int
    digest: bytes
    """BLAKE2b-256 of its ids."""


@dataclass(frozen=True)
class History:
    """A whole session. `stream`: int32[n], the tokens that each turn adds, in order."""

    id: str
    named: bool
    title: str
    created: float
    updated: float
    leaf: int
    """The turn at which the current branch ends."""
    turns: tuple[PastTurn, ...]
    bases: tuple[NamedBase, ...]
    stream: Ids

    @cached_property
    def starts(self) -> list[int]:
        """Where in the stream each turn's own tokens begin."""
        sizes = [turn.n - turn.n_shared for turn in self.turns]
        return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]

    def ids(self, place: int) -> Ids:
        """int32[n] tokens of a turn, prompt and reply."""
        parts = []
        n = self.turns[place].n
        while n:
            turn, start = self.turns[place], self.starts[place]
            if n > turn.n_shared:
                parts.append(self.stream[start : start + n - turn.n_shared])
            n, place = min(n, turn.n_shared), turn.origin
        return np.concatenate(parts[::-1]) if parts else self.stream[:0]

    def branch(self) -> Iterator[int]:
        """The turns of the current branch, from its end to the first."""
        place: int | None = self.leaf
        while place is not None:
            yield place
            place = self.turns[place].parent


@dataclass(frozen=True, slots=True)
class HistoryCopy:
    """The data copied under the store's lock; `history` arranges it without the lock."""

    info: SessionInfo
    turns: list[tuple[Any, ...]]
    nodes: dict[int, tuple[int, bytes]]
    """Node id -> (id of its parent, 0 for the root; ids) of every node on the turns' paths."""
    bases: list[Base]

    def history(self) -> History:
        """The session as it was when it was copied."""
        places = {row[0]: place for place, row in enumerate(self.turns)}
        visited: dict[int, int] = {}
        turns, stream = [], []
        for place, (_, parent, leaf, *counts, started, created, finished, tail) in enumerate(
            self.turns
        ):
            path = list(self._path(leaf))
            data = self._ids(leaf, tail)
            origin = next((visited[node] for node in path if node in visited), place)
            n = 0
            if origin < place:
                before_ids = ids_array(self._ids(*self._ends(origin)))
                n = common_prefix(ids_array(data), before_ids)
            stream.append(data[n * ID_BYTES :])
            visited |= dict.fromkeys(path, place)
            before = None if parent is None else places[parent]
            n_prompt, n_reply, n_cached = counts
            turns.append(
                PastTurn(
                    before, origin, n, n_prompt, n_reply, n_cached, started, created, bool(finished)
                )
            )
        info = self.info
        leaf = places[info.leaf] if info.leaf is not None else len(turns) - 1
        return History(
            info.id,
            info.named,
            info.title,
            info.created,
            info.updated,
            leaf,
            tuple(turns),
            beginning(self._ids(*self._ends(leaf)), self.bases),
            ids_array(b"".join(stream)),
        )

    def _path(self, node: int) -> Iterator[int]:
        """The nodes from this one up."""
        while node:
            yield node
            node = self.nodes[node][0]

    def _ids(self, leaf: int, tail: bytes) -> bytes:
        return b"".join([self.nodes[node][1] for node in self._path(leaf)][::-1]) + tail

    def _ends(self, place: int) -> tuple[int, bytes]:
        return self.turns[place][2], self.turns[place][-1]


def copy_history(
    table: SessionTable, session: SessionRow, nodes: Mapping[int, Node], bases: BaseTable | None
) -> HistoryCopy:
    """Copy the data of a session's history, under the lock. `nodes`: by id, at least those that its
    turns end in. `bases`: what it may begin with. Raises SessionFrozen, and StoreError if damage
    destroyed the tokens of a turn."""
    table.check_thawed(session)
    info, rows = table.info(session), turn_rows(table.catalog, session)
    if not rows:  # damage destroyed all of them
        raise tokens_lost(session)
    copied: dict[int, tuple[int, bytes]] = {}
    for row in rows:
        node = nodes.get(row[2])
        if (0 if node is None else node.p1) != row[5]:
            raise tokens_lost(session)
        while node is not None and node.parent is not None and node.id not in copied:
            copied[node.id] = (node.parent.id, node.ids)
            node = node.parent
    return HistoryCopy(
        info, rows, copied, [] if bases is None else visible_bases(bases, info.scope)
    )


def turn_rows(catalog: Catalog, session: SessionRow) -> list[tuple[Any, ...]]:
    """The catalog row of each turn, oldest first; the node of a turn without one is 0."""
    turns = catalog.sealed("turns", "session = ? ORDER BY id", (session.pk,))
    return [
        tuple((turn | {"reply_node": turn["reply_node"] or 0})[name] for name in _TURN)
        for turn in turns
    ]


def visible_bases(bases: BaseTable, scope: str) -> list[Base]:
    """The bases that a tenant's sessions may begin with."""
    listed = [base for base in bases.listing() if base.scope in (scope, public_of(scope))]
    return [base for base in listed if base.reuse == PREFIX]


def add_history(
    state: StoreState,
    table: SessionTable,
    growth: Growth,
    history: History,
    scope: str,
    media: Sequence[KeptMedium] = (),
) -> int:
    """Enter a history, or the turns that the session with its id lacks: where they do not continue its current
    branch they are branches beside it, as after an edit. A turn that lost its tokens has them again. Returns how many
    turns were added or had none. Runs under the lock, in a transaction that can grow the tree. media: those of it
    whose files are kept

    Raises InvalidRequest for a bad name, SessionFrozen if the session's tokens are not here."""
    check_name(history.id)
    session = table.lookup(history.id, scope)
    if session is None:
        session = table.create(history.id, scope, history.named, history.created)
        table.catalog.run("UPDATE sessions SET title = ? WHERE pk = ?", (history.title, session.pk))
    table.check_thawed(session)
    enter_media(state.catalog, session.pk, media, growth.now)
    known, turn_ids, n_added = _KnownTurns(state, session), list[int](), 0
    for place, turn in enumerate(history.turns):
        data = history.ids(place).tobytes()
        id = known.find(turn, data)
        if id is None:
            n_added += 1
            ends = growth.grow_turn(data, scope, turn.n_prompt, turn.n_cached)
            parent = None if turn.parent is None else turn_ids[turn.parent]
            facts = (turn.n_prompt, turn.n_reply, turn.n_cached, turn.started, turn.created)
            tail = data[turn.n_cached * ID_BYTES :]
            id = known.take_lost(turn)
            if id is None:
                id = table.enter_turn(session, parent, ends, facts, turn.finished, tail)
            else:
                table.give_tokens(id, ends, turn.n_cached, tail)
        turn_ids.append(id)
    info = table.info(session)
    leaf, n_tokens = info.leaf, info.n_tokens
    if leaf is None or leaf in {turn_ids[place] for place in history.branch()}:
        leaf, n_tokens = turn_ids[history.leaf], history.turns[history.leaf].n
    if n_added or leaf != info.leaf:
        table.set_leaf(session, leaf, n_tokens, max(history.updated, info.updated))
    return n_added


class _KnownTurns:
    """The turns of a session, by their facts. Under the lock."""

    def __init__(self, state: StoreState, session: SessionRow) -> None:
        self._nodes = state.tree.nodes
        self._found: dict[tuple[Any, ...], list[tuple[int, int, bytes]]] = {}
        self._lost: dict[tuple[Any, ...], list[int]] = {}
        for id, _, leaf, n_prompt, n_reply, n_cached, started, created, finished, tail in turn_rows(
            state.catalog, session
        ):
            facts, node = (
                (n_prompt, n_reply, started, created, bool(finished)),
                self._nodes.get(leaf),
            )
            if (0 if node is None else node.p1) == n_cached:
                self._found.setdefault(facts, []).append((id, leaf, tail))
            else:  # damage destroyed its tokens
                self._lost.setdefault(facts, []).append(id)

    def find(self, turn: PastTurn, ids: bytes) -> int | None:
        """The id of the same turn: one with the same facts and the same tokens."""
        for id, leaf, tail in self._found.get(_facts(turn), ()):
            node = self._nodes.get(leaf)
            if (b"" if node is None else node.prefix_bytes()) + tail == ids:
                return id
        return None

    def take_lost(self, turn: PastTurn) -> int | None:
        """The id of a turn with the same facts that lost its tokens, once."""
        ids = self._lost.get(_facts(turn))
        return ids.pop(0) if ids else None


def media_keys(history: History) -> set[bytes]:
    """The names of the pictures and sounds among a history's tokens, of MEDIA_MAX of them at least."""
    found: set[bytes] = set()
    for place, turn in enumerate(history.turns):
        start = history.starts[place]
        if not (history.stream[start : start + turn.n - turn.n_shared] < 0).any():
            continue
        ids, n_known = history.ids(place), turn.n_shared
        if n_known and ids[n_known - 1] < 0:  # a medium may continue behind what is shared
            n_known = int(np.flatnonzero(starts_of(ids[:n_known]))[-1])
        ids = ids[n_known:]
        starts = np.flatnonzero(starts_of(ids))
        ids = ids[: starts[MEDIA_MAX]] if len(starts) > MEDIA_MAX else ids
        found |= {medium_key(ids[start:end]) for start, end in spans_of(ids)}
        if len(found) > MEDIA_MAX:
            break
    return found


def _facts(turn: PastTurn) -> tuple[Any, ...]:
    return turn.n_prompt, turn.n_reply, turn.started, turn.created, turn.finished


def beginning(ids: bytes, bases: Sequence[Base]) -> tuple[NamedBase, ...]:
    """The bases that `ids` begin with, the shortest first."""
    found = []
    digest, at = hashlib.blake2b(digest_size=32), 0
    for base in sorted(bases, key=lambda base: (base.n_tokens, base.level, base.name)):
        if base.n_tokens * ID_BYTES > len(ids):
            break
        digest.update(ids[at : base.n_tokens * ID_BYTES])
        at = base.n_tokens * ID_BYTES
        if digest.digest() == base.digest:
            found.append(NamedBase(base.name, base.level, base.n_tokens, base.digest))
    return tuple(found)
