"""Sessions and turns in the catalog: recognition, recording, listing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from towerd.errors import InvalidRequest, NotFound, SessionDeleted, SessionFrozen, TokensLost
from towerd.store.catalog.catalog import Catalog
from towerd.store.sessions.conversations import note_deletion
from towerd.store.sessions.deletions import (
    Deletion,
    Deletions,
    DeletionWatch,
    decode_hashes,
    hashes_at,
)
from towerd.store.sessions.media import forget_media
from towerd.store.sessions.responses import forget_session
from towerd.store.sessions.turn import SessionInfo, Turn, TurnInfo
from towerd.store.tree.node import Node
from towerd.store.tree.scope import MARK, TENANT_SQL, tenant_of
from towerd.store.tree.tree import PrefixTree

NAME_CHARS_MAX = 200
TITLE_CHARS_MAX = 500
RECOGNISED_TOKENS_MIN = 2
"""Every conversation begins with the BOS token, of which an empty prompt consists."""

_COLUMNS = (
    "id, scope, title, named, leaf, n_tokens,"
    " (SELECT count(*) FROM turns WHERE turns.session = sessions.pk), created, updated, cold_bytes"
)
_SESSION = f"SELECT {_COLUMNS} FROM sessions WHERE tokenizer = ?"


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session that exists: its row and public id."""

    pk: int
    id: str


@dataclass(slots=True)
class SessionTable:
    """The sessions of one tokenizer. The store's lock is held around every call."""

    catalog: Catalog
    tokenizer: int

    def recognise(self, known: Iterable[Node], scope: str) -> SessionRow | None:
        """The session of the tenant of `scope` that has a prompt end or a reply end at the deepest
        possible node of `known` (longest prefix first); of several, the one used last."""
        tenant = tenant_of(scope)
        for node in known:
            if node.p1 < RECOGNISED_TOKENS_MIN:
                break
            rows = self.catalog.rows(
                "SELECT s.pk, s.id FROM turns t JOIN sessions s ON s.pk = t.session"
                " WHERE (t.prompt_node = ? OR t.reply_node = ?)"
                " AND (s.scope = ? OR s.scope > ? AND s.scope < ?)"
                " ORDER BY s.updated DESC, s.pk DESC LIMIT 1",
                (node.id, node.id, tenant, *_with_any_adapters(tenant)),
            )
            if rows:
                return SessionRow(*rows[0])
        return None

    def last_on(self, path: Sequence[Node], scope: str) -> tuple[str, int] | None:
        """The session of the tenant of `scope` with a prompt end or a reply end at the deepest possible
        node of a path, and the position of that end; of several, the one used last."""
        tenant, ends = tenant_of(scope), {node.id: node.p1 for node in path}
        ids = str(list(ends))
        rows = self.catalog.rows(
            "SELECT s.id, t.prompt_node, t.reply_node, s.updated FROM turns t"
            " JOIN sessions s ON s.pk = t.session"
            " WHERE (t.prompt_node IN (SELECT value FROM json_each(?))"
            " OR t.reply_node IN (SELECT value FROM json_each(?)))"
            " AND (s.scope = ? OR s.scope > ? AND s.scope < ?)",
            (ids, ids, tenant, *_with_any_adapters(tenant)),
        )
        found = [
            (end, updated, id)
            for id, *nodes, updated in rows
            for node in nodes
            if (end := ends.get(node, 0)) >= RECOGNISED_TOKENS_MIN
        ]
        if not found:
            return None
        end, _, id = max(found)
        return id, end

    def find(self, id: str, scope: str | None) -> SessionRow:
        """The session with this id; of several of one tenant, which differ in their adapters, that
        of `scope` itself, or else the one used last. Raises NotFound, and
        InvalidRequest if scope is None and several tenants have one."""
        rows = self.catalog.rows(
            "SELECT pk, id, scope FROM sessions WHERE tokenizer = ? AND id = ?"
            " ORDER BY updated DESC, pk DESC",
            (self.tokenizer, id),
        )
        rows = [row for row in rows if scope is None or tenant_of(row[2]) == tenant_of(scope)]
        rows.sort(key=lambda row: row[2] != scope)
        if not rows:
            raise NotFound(f"there is no session {id!r}")
        tenants = {tenant_of(row[2]) for row in rows}
        if len(tenants) > 1:
            scopes = ", ".join(sorted(tenants))
            raise InvalidRequest(f"several tenants have a session {id!r}: name one of {scopes}")
        return SessionRow(rows[0][0], rows[0][1])

    def enter(self, turn: Turn, known: Iterable[Node], now: float) -> tuple[SessionRow, bool]:
        """The session this turn belongs to, created if need be, and whether it is new."""
        found = None
        if turn.session is None:
            found = self.recognise(known, turn.scope)
        else:
            check_name(turn.session)
            found = self.lookup(turn.session, turn.scope)
        if found is not None:
            return found, False
        id = secrets.token_hex(8) if turn.session is None else turn.session
        return self.create(id, turn.scope, turn.session is not None, now), True

    def lookup(self, id: str, scope: str) -> SessionRow | None:
        """The session with this id of the tenant of `scope`, that of `scope` itself first."""
        tenant = tenant_of(scope)
        rows = self.catalog.rows(
            "SELECT pk, id FROM sessions WHERE tokenizer = ? AND id = ?"
            " AND (scope = ? OR scope > ? AND scope < ?)"
            " ORDER BY scope = ? DESC, updated DESC, pk DESC LIMIT 1",
            (self.tokenizer, id, tenant, *_with_any_adapters(tenant), scope),
        )
        return SessionRow(*rows[0]) if rows else None

    def create(self, id: str, scope: str, named: bool, now: float) -> SessionRow:
        """Enter a session without turns, inside a transaction."""
        facts = {"tokenizer": self.tokenizer, "scope": scope, "id": id, "named": named}
        pk = self.catalog.insert("sessions", **facts, created=now, updated=now)
        return SessionRow(pk, id)

    def record(
        self,
        session: SessionRow,
        turn: Turn,
        known: Iterable[Node],
        ends: tuple[Node, Node],
        tail: bytes,
        now: float,
    ) -> int:
        """Enter the turn and make it the session's leaf. `known`: the nodes that its prompt
        matched in full before it was inserted, longest prefix first; `ends`: its prompt end and
        reply end."""
        parent = self._parent_turn(session, known, len(turn.prompt))
        facts = (len(turn.prompt), len(turn.reply), turn.n_cached, turn.started_s, now)
        turn_id = self.enter_turn(session, parent, ends, facts, turn.finished, tail)
        self.set_leaf(session, turn_id, len(turn.prompt) + len(turn.reply), now)
        return turn_id

    def enter_turn(
        self,
        session: SessionRow,
        parent: int | None,
        ends: tuple[Node, Node],
        facts: tuple[int, int, int, float, float],
        finished: bool,
        tail: bytes,
    ) -> int:
        """Insert one row of the turns table, inside a transaction; `facts`: n_prompt,
        n_reply, n_cached, started, created. A coded copy of the session lacks the turn and goes."""
        self._drop_copy(session)
        n_prompt, n_reply, n_cached, started, created = facts
        return self.catalog.insert(
            "turns",
            session=session.pk,
            parent=parent,
            prompt_node=ends[0].id or None,
            reply_node=ends[1].id or None,
            n_prompt=n_prompt,
            n_reply=n_reply,
            n_cached=n_cached,
            started=started,
            created=created,
            finished=finished,
            tail=tail,
        )

    def give_tokens(
        self, turn_id: int, ends: tuple[Node, Node], n_cached: int, tail: bytes
    ) -> None:
        """Give a turn its tokens again, which were lost, inside a transaction."""
        self.catalog.run(
            "UPDATE turns SET prompt_node = ?, reply_node = ?, n_cached = ?, tail = ? WHERE id = ?",
            (ends[0].id or None, ends[1].id or None, n_cached, tail, turn_id),
        )

    def _drop_copy(self, session: SessionRow) -> None:
        copies = "SELECT session FROM cold WHERE session = ? AND frozen = 0"
        self.catalog.run(f"DELETE FROM blobs WHERE session IN ({copies})", (session.pk,))
        self.catalog.run("DELETE FROM cold WHERE session = ? AND frozen = 0", (session.pk,))

    def set_leaf(self, session: SessionRow, turn_id: int, n_tokens: int, now: float) -> None:
        """Set the end of the current branch, inside a transaction."""
        self.catalog.run(
            "UPDATE sessions SET leaf = ?, n_tokens = ?, updated = ? WHERE pk = ?",
            (turn_id, n_tokens, now, session.pk),
        )

    def listing(self, scope: str | None, limit: int) -> list[SessionInfo]:
        """Sessions, most recently used first: all, those of a tenant with any adapters, or
        those of a scope."""
        if scope is None:
            return self._latest("", (), limit)
        scopes = [scope, *self.scopes_with_adapters(scope)]
        found = [info for each in scopes for info in self._latest(" AND scope = ?", (each,), limit)]
        if len(scopes) > 1:
            found.sort(key=lambda info: info.updated, reverse=True)
        return found[:limit]

    def beginning(self, prefix: str, scope: str | None, limit: int) -> list[SessionInfo]:
        """Sessions whose id was generated and begins with `prefix`, of a tenant or of all."""
        rows = self.catalog.rows(
            f"{_SESSION} AND named = 0 AND id >= ? AND id < ?"
            f" AND (? IS NULL OR ? IN (scope, {TENANT_SQL})) ORDER BY id, scope LIMIT ?",
            (self.tokenizer, prefix, prefix + "\U0010ffff", scope, scope, limit),
        )
        return [_info(row) for row in rows]

    def _latest(self, whose: str, params: tuple[str, ...], limit: int) -> list[SessionInfo]:
        rows = self.catalog.rows(
            f"{_SESSION}{whose} ORDER BY updated DESC, pk DESC LIMIT ?",
            (self.tokenizer, *params, limit),
        )
        return [_info(row) for row in rows]

    def ends(self, after: int, limit: int) -> list[tuple[int, int]]:
        """(row id, node) of sessions whose row id is beyond `after`, in order: the node that their
        current branch ends with, or that the blob of a frozen one continues; 0 if there is none."""
        return [
            (pk, node)
            for pk, node in self.catalog.rows(
                "SELECT s.pk, coalesce(t.reply_node, t.prompt_node, c.base, 0) FROM sessions AS s"
                " LEFT JOIN turns AS t ON t.id = s.leaf LEFT JOIN cold AS c ON c.session = s.pk"
                # the + keeps SQLite from an index that it would have to sort by row ids
                " WHERE +s.tokenizer = ? AND s.pk > ? ORDER BY s.pk LIMIT ?",
                (self.tokenizer, after, limit),
            )
        ]

    def ends_of(self, leaves: Collection[int]) -> dict[int, int]:
        """Leaf turn -> the node of `ends`, of the sessions whose current branch ends with these turns."""
        return dict(
            self.catalog.rows(
                "SELECT s.leaf, coalesce(t.reply_node, t.prompt_node, c.base, 0) FROM sessions AS s"
                " LEFT JOIN turns AS t ON t.id = s.leaf LEFT JOIN cold AS c ON c.session = s.pk"
                " WHERE +s.tokenizer = ? AND s.leaf IN (SELECT value FROM json_each(?))",
                (self.tokenizer, str(list(leaves))),
            )
        )

    def count_branches(self, leaves: Collection[int]) -> dict[int, int]:
        """Leaf turn -> how many turns none continues, of the sessions whose current branch ends with these turns."""
        return dict(
            self.catalog.rows(
                "SELECT s.leaf, count(*) FROM sessions AS s JOIN turns AS t ON t.session = s.pk"
                " WHERE +s.tokenizer = ? AND s.leaf IN (SELECT value FROM json_each(?))"
                " AND NOT EXISTS (SELECT 1 FROM turns AS c WHERE c.parent = t.id) GROUP BY s.pk",
                (self.tokenizer, str(list(leaves))),
            )
        )

    def other_scopes(self, scope: str) -> list[str]:
        """The scopes that other sessions of the same tenant may have tokens in."""
        tenant = tenant_of(scope)
        scopes = [tenant, *self.scopes_with_adapters(tenant)]
        return [each for each in scopes if each != scope]

    def scopes_with_adapters(self, tenant: str) -> list[str]:
        """The scopes of a tenant's sessions that began under adapters."""
        found: list[str] = []
        above, end = _with_any_adapters(tenant)
        # one step through the index for each scope, however many sessions it has
        sql = "SELECT min(scope) FROM sessions WHERE tokenizer = ? AND scope > ? AND scope < ?"
        while (after := self.catalog.rows(sql, (self.tokenizer, above, end))[0][0]) is not None:
            found.append(after)
            above = after
        return found

    def info(self, session: SessionRow) -> SessionInfo:
        """The entry of one session in `listing`."""
        return _info(self.catalog.rows(f"{_SESSION} AND pk = ?", (self.tokenizer, session.pk))[0])

    def turns(self, session: SessionRow) -> list[TurnInfo]:
        """Every turn, oldest first."""
        rows = self.catalog.rows(
            "SELECT id, parent, coalesce(prompt_node, 0), coalesce(reply_node, 0), n_prompt,"
            " n_reply, n_cached, started, created, finished FROM turns WHERE session = ?"
            " ORDER BY id",
            (session.pk,),
        )
        parents = {row[0]: row[1] for row in rows}
        branch: set[int] = set()
        at = self.info(session).leaf
        while at is not None and at not in branch:
            branch.add(at)
            at = parents.get(at)
        return [TurnInfo(*(*row[:9], bool(row[9]), row[0] in branch)) for row in rows]

    def leaf_ids(self, session: SessionRow) -> tuple[int, bytes]:
        """(reply node, 0 for the root; tail ids) of the current leaf turn. Raises
        SessionFrozen if they are coded, StoreError if damage took them."""
        (row,) = self.catalog.sealed("sessions", "pk = ?", (session.pk,))
        if not row["n_tokens"]:
            return 0, b""
        for turn in self.catalog.sealed("turns", "id = ?", (row["leaf"],)):
            has_tokens = turn["reply_node"] is not None or turn["tail"]
            if row["cold_bytes"] and not has_tokens:
                self.check_thawed(session)
            if turn["reply_node"] is not None or turn["n_cached"] == 0:
                return turn["reply_node"] or 0, turn["tail"]
        raise tokens_lost(session)

    def rename(self, session: SessionRow, title: str) -> None:
        """Set the title. Raises InvalidRequest if it is too long."""
        if len(title) > TITLE_CHARS_MAX:
            raise InvalidRequest(f"a title may have {TITLE_CHARS_MAX} characters")
        with self.catalog.transaction():
            self.catalog.run("UPDATE sessions SET title = ? WHERE pk = ?", (title, session.pk))

    def _known_by(self, session: SessionRow, nodes: Mapping[int, Node]) -> tuple[str, set[int]]:
        """The scope of a session and its prefix hashes, by which the turns of running requests are
        known to be its own when it is deleted."""
        pk = (session.pk,)
        ((scope,),) = self.catalog.rows("SELECT scope FROM sessions WHERE pk = ?", pk)
        rows = self.catalog.rows(
            "SELECT prompt_node FROM turns WHERE session = ?"
            " UNION SELECT reply_node FROM turns WHERE session = ?",
            pk * 2,
        )
        ends = [nodes[id] for (id,) in rows if id in nodes]
        hashes = hashes_at([end for end in ends if end.p1 >= RECOGNISED_TOKENS_MIN], scope)
        for (marks,) in self.catalog.rows("SELECT marks FROM cold WHERE session = ?", pk):
            hashes |= decode_hashes(marks)
        return scope, hashes

    def is_deleted(self, since: DeletionWatch, id: str, scope: str) -> bool:
        """Whether the session `id` was deleted `since`, even if another one has the id now."""
        return since.has_named(self.tokenizer, scope, id)

    def check_not_deleted(
        self,
        since: DeletionWatch | None,
        id: str | None,
        scope: str,
        ids: bytes = b"",
        tree: PrefixTree | None = None,
    ) -> None:
        """Raises SessionDeleted if the session `id`, or without one the session that `ids` continue,
        was deleted `since`; `tree`: that of its tokenizer."""
        if since is None:
            return
        if id is not None:
            is_deleted = self.is_deleted(since, id, scope)
        else:
            n = since.deepest(self.tokenizer, ids, scope)
            known = tree.matched(ids, scope, self.other_scopes(scope)) if n and tree else ()
            as_far = (node for node in known if node.p1 >= n)
            is_deleted = n > 0 and self.recognise(as_far, scope) is None
        if is_deleted:
            raise SessionDeleted("The conversation was deleted while this was on its way into it.")

    def delete(self, session: SessionRow, nodes: Mapping[int, Node], deletions: Deletions) -> int:
        """Delete the session, its turns and their responses, and tell whoever watches, in any process; the
        next gc removes its segments. `nodes`: those of its turns, at least. Returns its row id."""
        scope, hashes = self._known_by(session, nodes)
        with self.catalog.transaction():
            pk = (session.pk,)
            forget_session(self.catalog, session.pk)
            forget_media(self.catalog, session.pk)
            self.catalog.run("UPDATE sessions SET leaf = NULL WHERE pk = ?", pk)
            self.catalog.run("UPDATE turns SET parent = NULL WHERE session = ?", pk)
            self.catalog.run("DELETE FROM turns WHERE session = ?", pk)
            self.catalog.run("DELETE FROM blobs WHERE session = ?", pk)
            self.catalog.run("DELETE FROM cold WHERE session = ?", pk)
            self.catalog.run("DELETE FROM sessions WHERE pk = ?", pk)
            note_deletion(self.catalog)
        deletion = Deletion(self.tokenizer, scope, session.id, tuple(hashes), time.monotonic())
        deletions.note(deletion)
        self.catalog.tell(deletion)
        return session.pk

    def check_thawed(self, session: SessionRow) -> None:
        """Raises SessionFrozen unless all tokens of the session are in the store."""
        if self.catalog.rows(
            "SELECT 1 FROM sessions WHERE pk = ? AND cold_bytes > 0", (session.pk,)
        ):
            raise SessionFrozen(
                f"Session {session.id!r} is frozen: thaw it with towerctl thaw first."
            )

    def _parent_turn(self, session: SessionRow, known: Iterable[Node], n_prompt: int) -> int | None:
        """The turn this one continues: a shorter prompt whose reply, or at least whose prompt
        (the client may have rendered the reply anew), lies on the path. A regeneration has the
        same prompt length and so finds the turn before."""
        for node in known:
            rows = self.catalog.rows(
                "SELECT id FROM turns WHERE session = ? AND n_prompt < ?"
                " AND (prompt_node = ? OR reply_node = ?) ORDER BY id DESC LIMIT 1",
                (session.pk, n_prompt, node.id, node.id),
            )
            if rows:
                return int(rows[0][0])
        return None


def session_page(
    catalog: Catalog, own: int, after: int, limit: int
) -> list[tuple[int, SessionInfo]]:
    """(row, session) of every tokenizer, of which `own` is the served model's, in order of the rows
    behind `after`."""
    rows = catalog.rows(
        f"SELECT pk, tokenizer, {_COLUMNS} FROM sessions WHERE pk > ? ORDER BY pk LIMIT ?",
        (after, limit),
    )
    digests = dict(catalog.rows("SELECT id, digest FROM tokenizers WHERE id != ?", (own,)))
    return [
        (pk, replace(_info(tuple(facts)), tokenizer=digests.get(of, b"").hex()))
        for pk, of, *facts in rows
    ]


def _with_any_adapters(tenant: str) -> tuple[str, str]:
    """The bounds, exclusive, of the scopes that are a tenant's with any adapters."""
    return tenant + MARK, tenant + chr(ord(MARK) + 1)


def tokens_lost(session: SessionRow) -> TokensLost:
    """The error for a turn whose tokens neither the catalog nor its journal has."""
    return TokensLost(
        f"Session {session.id!r} lost tokens when the catalog and its journal were both damaged: "
        "import a copy of it, or remove it with towerctl sessions rm."
    )


def check_name(name: str) -> None:
    """InvalidRequest unless this can be a session's or a base's name."""
    if not 0 < len(name) <= NAME_CHARS_MAX or not name.isprintable():
        raise InvalidRequest(f"a name must be 1 to {NAME_CHARS_MAX} printable characters")


def _info(row: tuple[Any, ...]) -> SessionInfo:
    return SessionInfo(row[0], row[1], row[2], bool(row[3]), *row[4:])
