"""Sessions of tokenizers other than the open one: listed and read as text, renamed, deleted.

Their token ids mean something in their own vocabulary only, of which the store keeps a copy. They
are exported and imported with its words. They continue under their own model, or as new sessions
when a client sends their text to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from towerd.errors import InvalidRequest, NotFound
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.sessions.deletions import Deletions, DeletionWatch
from towerd.store.sessions.frozen import FrozenSession, damaged_session, read_coded
from towerd.store.sessions.history import History, add_history, copy_history
from towerd.store.sessions.media import KeptMedium, MediaTable
from towerd.store.sessions.sessions import SessionRow, SessionTable
from towerd.store.sessions.turn import SessionInfo, TurnInfo
from towerd.store.state.state import StoreState, load_foreign
from towerd.store.tree.node import Node
from towerd.tokens import ID_BYTES, Ids, ids_array

_ABOVE = (
    "WITH RECURSIVE up(id, parent, p0, p1, ids) AS ("
    " SELECT id, parent, p0, p1, ids FROM segments WHERE id = ?"
    " UNION ALL SELECT s.id, s.parent, s.p0, s.p1, s.ids FROM segments s JOIN up"
    " ON s.id = up.parent AND s.p0 < up.p0) SELECT id, coalesce(parent, 0), ids, p1 FROM up ORDER BY p0"
)


def prefix_of(state: StoreState, segment: int) -> bytes:
    """The ids (int32 LE) from the root to the end of a segment of any tokenizer."""
    return b"".join([ids for _, _, ids, _ in _path(state, segment)])


def _path(state: StoreState, segment: int) -> list[tuple[int, int, bytes, int]]:
    """(id, parent or 0, ids, p1) of the segments from the root down to one of any tokenizer."""
    return state.catalog.rows(_ABOVE, (segment,))


_ENDS = (
    "SELECT id FROM segments WHERE id IN (SELECT prompt_node FROM turns WHERE session = ?"
    " UNION SELECT reply_node FROM turns WHERE session = ?) ORDER BY p1 DESC"
)


def _nodes_of(state: StoreState, session: SessionRow) -> dict[int, Node]:
    """The nodes that a session's prompts and replies end in, and all above them, by id; without those
    of which the catalog lost what comes before. Their scopes are not read."""
    nodes = {0: Node(0, None, "", 0, b"")}
    for (end,) in state.catalog.rows(_ENDS, (session.pk, session.pk)):
        if end in nodes:
            continue
        for id, parent, ids, p1 in _path(state, end):
            above, p0 = nodes.get(parent), p1 - len(ids) // ID_BYTES
            if id not in nodes and above is not None and above.p1 == p0:
                nodes[id] = Node(id, above, "", p0, ids)
    return nodes


@dataclass(frozen=True, slots=True)
class ForeignSession:
    """One session of another tokenizer."""

    info: SessionInfo
    turns: list[TurnInfo]


class ForeignSessions:
    """The sessions of the other tokenizers of an open store. Thread-safe.

    `tokenizer`, the hex digest of one, tells sessions of one id apart; of several, the one used
    last is meant."""

    def __init__(self, state: StoreState, deletions: Deletions, media: MediaTable) -> None:
        self._state = state
        self._media = media
        self._deletions = deletions

    def listing(self, scope: str | None, limit: int) -> list[SessionInfo]:
        """Sessions of one scope, or of all, the last used first."""
        found = self._each(lambda table: table.listing(scope, limit))
        found.sort(key=lambda info: info.updated, reverse=True)
        return found[:limit]

    def beginning(self, prefix: str, scope: str | None, limit: int) -> list[SessionInfo]:
        """Sessions whose id was generated and begins with `prefix`."""
        return self._each(lambda table: table.beginning(prefix, scope, limit))

    def _each(self, look: Callable[[SessionTable], list[SessionInfo]]) -> list[SessionInfo]:
        """What `look` finds among the sessions of each tokenizer."""
        with self._state.locked():
            return [
                replace(info, tokenizer=digest.hex())
                for pk, digest in self._tokenizers()
                for info in look(self._table(pk))
            ]

    def session(self, id: str, scope: str | None = None, tokenizer: str = "") -> ForeignSession:
        """One session and its turns. Raises NotFound; StoreError if the id is ambiguous."""
        with self._state.locked():
            table, row, digest = self._find(id, scope, tokenizer)
            return ForeignSession(
                replace(table.info(row), tokenizer=digest.hex()), table.turns(row)
            )

    def session_ids(
        self, id: str, scope: str | None = None, tokenizer: str = ""
    ) -> tuple[Ids, bytes]:
        """Every token of the current branch, int32, and the digest of its tokenizer. Raises as
        `session`, and SessionFrozen."""
        with self._state.locked():
            table, row, digest = self._find(id, scope, tokenizer)
            leaf, tail = table.leaf_ids(row)
            data = prefix_of(self._state, leaf) if leaf else b""
        return ids_array(data + tail), digest

    def frozen(
        self, id: str, scope: str | None = None, tokenizer: str = ""
    ) -> tuple[FrozenSession, bytes]:
        """A frozen session, its bytes checked, and the digest of its tokenizer. Raises as
        `session`, and ThawError (damaged, or not frozen)."""
        with self._state.locked():
            table, row, digest = self._find(id, scope, tokenizer)
            prefix = partial(prefix_of, self._state)
            found = read_coded(table, row, prefix, lambda _: [], frozen=True)
        if found is None:
            raise damaged_session(id, "its coded tokens are gone from the catalog")
        return found, digest

    def history(
        self, id: str, scope: str | None = None, tokenizer: str = ""
    ) -> tuple[History, bytes]:
        """A session in a form that another store can import, and the digest of its tokenizer. Raises
        as `session_ids`."""
        with self._state.locked():
            table, row, digest = self._find(id, scope, tokenizer)
            taken = copy_history(table, row, _nodes_of(self._state, row), None)
        return taken.history(), digest

    def identity(self, digest: bytes) -> TokenizerIdentity:
        """The identity of a tokenizer that the store has."""
        with self._state.locked():
            ((pk,),) = self._state.catalog.rows(
                "SELECT id FROM tokenizers WHERE digest = ?", (digest,)
            )
            return self._state.catalog.tokenizer(pk)

    def enter(self, tokenizer: TokenizerIdentity) -> bytes:
        """The digest of another tokenizer, which is entered if it is new. Raises InvalidRequest if it
        is the open one, and DiskFull."""
        with self._state.locked():
            catalog = self._state.catalog
            pk = catalog.enter_tokenizer(tokenizer, self._state.clock())
            if pk == self._state.identity.tokenizer:
                raise InvalidRequest(
                    "The conversation says that its tokenizer is the served one, but it has "
                    "another vocabulary: export it again where it is from."
                )
            return bytes(catalog.rows("SELECT digest FROM tokenizers WHERE id = ?", (pk,))[0][0])

    def add_history(
        self,
        history: History,
        scope: str,
        digest: bytes,
        since: DeletionWatch | None = None,
        media: Sequence[KeptMedium] = (),
    ) -> int:
        """Enter a history, or the turns that the session with its id lacks, under an entered
        tokenizer, in one transaction; returns how many turns were added. Raises InvalidRequest for a
        bad name, SessionDeleted if the session was deleted `since`, SessionFrozen or DiskFull."""
        with self._state.locked():
            ((pk,),) = self._state.catalog.rows(
                "SELECT id FROM tokenizers WHERE digest = ?", (digest,)
            )
            state, table = load_foreign(self._state, pk, digest), self._table(pk)
            table.check_not_deleted(since, history.id, scope)
            with state.growing() as growth:
                return add_history(state, table, growth, history, scope, media)

    def rename(
        self, id: str, title: str, scope: str | None = None, tokenizer: str = ""
    ) -> SessionInfo:
        """Set a title. Raises as `session`, or InvalidRequest."""
        with self._state.locked():
            table, row, digest = self._find(id, scope, tokenizer)
            table.rename(row, title)
            return replace(table.info(row), tokenizer=digest.hex())

    def delete(self, id: str, scope: str | None = None, tokenizer: str = "") -> None:
        """Forget a session; `gc` then frees what nothing else needs. Raises as `session`."""
        with self._state.locked():
            table, row, _ = self._find(id, scope, tokenizer)
            nodes = {}
            if self._state.catalog.is_shared:  # another process may be answering it
                nodes = _nodes_of(self._state, row)
            with self._media.leaving(row.pk):
                table.delete(row, nodes, self._deletions)

    def _find(
        self, id: str, scope: str | None, tokenizer: str
    ) -> tuple[SessionTable, SessionRow, bytes]:
        """The session used last of those with this id."""
        found: list[tuple[float, SessionTable, SessionRow, bytes]] = []
        for pk, digest in self._tokenizers():
            table = self._table(pk)
            if tokenizer not in ("", digest.hex()):
                continue
            try:
                row = table.find(id, scope)
            except NotFound:
                continue
            found.append((table.info(row).updated, table, row, digest))
        if not found:
            raise NotFound(f"there is no session {id!r}")
        return max(found, key=lambda each: each[0])[1:]

    def _tokenizers(self) -> list[tuple[int, bytes]]:
        return self._state.catalog.rows(
            "SELECT id, digest FROM tokenizers WHERE id != ?", (self._state.identity.tokenizer,)
        )

    def _table(self, tokenizer: int) -> SessionTable:
        return SessionTable(self._state.catalog, tokenizer)
