"""Frozen sessions in the catalog: their tokens as a blob, their turns without segments.

A session is frozen in two steps, each a transaction: `put` makes the blob durable beside the tokens
that it encodes; `drop` empties the turns and removes the segments that nothing else needs. In
between the blob is only a copy, for as long as the session keeps its rows; its next turn removes
the copy. `restore` undoes the second step, so that the blob is a copy again. Titles, times, branches
and lengths stay in the clear; token ids do not. Tokens shared with other sessions stay in the tree
and are the blob's context, or those of a base like the session's own prompt (`alike.py`). The store never reads a blob; the owner of the model's codec does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import TypeAlias

from towerd.codec import container
from towerd.codec.base import ids_hash
from towerd.errors import InvalidRequest, NotFound, StoreError, ThawError
from towerd.store.rows.checkpoints import is_checkpointed_elsewhere
from towerd.store.rows.collect import (
    OtherUsers,
    common_base,
    delete,
    forget,
    own_nodes,
    unneeded,
    unviewed,
)
from towerd.store.sessions.alike import AlikeBases, Context
from towerd.store.sessions.bases import BaseTable
from towerd.store.sessions.frozen import (
    CodedSession,
    FrozenSession,
    SessionBusy,
    WarmSession,
    damaged_session,
    encode_prefix_hashes,
    encode_turns,
    history_prefix_hashes,
    prefix_hash_rows,
    read_coded,
    row_digest,
    turn_ends,
)
from towerd.store.sessions.history import History, copy_history, turn_rows, visible_bases
from towerd.store.sessions.prefix_hashes import PrefixHashIndex, prefix_hashes, prefix_hashes_at
from towerd.store.sessions.sessions import RECOGNISED_TOKENS_MIN, SessionRow, SessionTable
from towerd.store.sessions.turn import SessionInfo
from towerd.store.state.state import Growth, StoreState
from towerd.store.tree.node import Node
from towerd.store.tree.scope import TENANT_SQL
from towerd.tokens import ID_BYTES, ids_array

Place: TypeAlias = tuple[float, int]
"""(last use, row id) of a session, by which pages are ordered."""
START: Place = (-1e300, 0)

_PAGE = (
    "SELECT s.updated, s.pk, s.id, s.scope, c.session, c.base, t.reply_node"
    " FROM sessions s INDEXED BY sessions_warm JOIN turns t ON t.id = s.leaf"
    " LEFT JOIN cold c ON c.session = s.pk"
    " WHERE s.tokenizer = ? AND s.cold_bytes = 0 AND (s.updated, s.pk) > (?, ?)"
    " AND s.updated < ? ORDER BY s.updated, s.pk LIMIT ?"
)


_CODED = (
    "SELECT pk, id, scope FROM cold JOIN sessions ON pk = session"
    " WHERE tokenizer = ? AND session > ?"
    f" AND (? IS NULL OR ? IN (scope, {TENANT_SQL})) ORDER BY session LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class IdleSession:
    """A session that has its tokens and is unused."""

    place: Place
    id: str
    scope: str
    has_copy: bool
    """Whether its coded copy has all its turns."""
    has_rows: bool
    """Whether its end, or anything that no other session needs, has rows; True without a copy."""


def _has_rows(
    state: StoreState,
    session: int,
    leaf: int | None,
    base: int | None,
    holds: Callable[[Node], bool],
) -> bool:
    """Mostly the end of the current branch tells; what freezing would remove is looked for only
    where rows have begun to leave."""
    nodes = state.tree.nodes
    end = nodes.get(leaf or 0)
    if end is not None and (holds(end) or is_viewed(state, end)):
        return True
    own = own_nodes(state, session)
    if not any(holds(node) or is_viewed(state, node) for node in own):
        return False
    doomed = unneeded(OtherUsers(state, session), own, nodes.get(base or 0))
    return any(holds(node) or is_viewed(state, node) for node in doomed)


def is_viewed(state: StoreState, node: Node) -> bool:
    """Whether any model has rows of a segment on disk, or another one a state checkpoint at its end:
    those of others stay until their space is needed, too."""
    rows = state.catalog.rows("SELECT 1 FROM views WHERE node = ? LIMIT 1", (node.id,))
    return bool(rows) or is_checkpointed_elsewhere(state, node)


CANDIDATES_MAX = 64
"""Maximum number of frozen sessions examined when a prompt matches several equally far."""
_IS_STILL = "SELECT 1 FROM cold WHERE session = ? AND digest = ? AND frozen = 1"
_COPY = "SELECT marks, base FROM cold WHERE session = ? AND digest = ? AND frozen = 0"
_WITHOUT_TOKENS = (
    "SELECT id, n_prompt, n_prompt + n_reply, n_cached FROM turns"
    " WHERE session = ? AND reply_node IS NULL AND tail = x'' ORDER BY id"
)


class ColdTable:
    """The frozen sessions of one open store. Thread-safe."""

    def __init__(self, state: StoreState, sessions: SessionTable, bases: BaseTable) -> None:
        self._state = state
        self._sessions = sessions
        self._bases = bases
        self.alike = AlikeBases(state, bases)
        self._mine = state.identity.tokenizer
        self._prefix_hashes = PrefixHashIndex()
        self._prefix_hashes.load(prefix_hash_rows(state))
        is_known = not state.catalog.is_shared  # what others freeze is learned under the lock
        self.is_empty = is_known and not state.catalog.rows("SELECT 1 FROM cold LIMIT 1")
        """False as soon as any session is about to be frozen; may be read without the lock."""

    # --- looking --------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """The number of frozen sessions and the size of their blobs; the number of sessions that
        have a copy in coded form beside their tokens."""
        mine = (self._mine,)
        with self._state.locked():
            ((n, n_bytes),) = self._state.catalog.rows(
                "SELECT count(*), coalesce(sum(cold_bytes), 0) FROM sessions"
                " WHERE tokenizer = ? AND cold_bytes > 0",
                mine,
            )
            ((n_copied,),) = self._state.catalog.rows(
                "SELECT count(*) FROM sessions INDEXED BY sessions_warm WHERE tokenizer = ?"
                " AND cold_bytes = 0 AND EXISTS (SELECT 1 FROM cold WHERE session = pk)",
                mine,
            )
        found = {"frozen_sessions": n, "cold_bytes": n_bytes, "copied_sessions": n_copied}
        return found | self.alike.stats()

    def idle(self, before: float, limit: int, scope: str | None = None) -> list[SessionInfo]:
        """Sessions with tokens that were last used before a Unix time and are not frozen,
        least recently used first."""
        with self._state.locked():
            rows = self._state.catalog.rows(
                "SELECT pk, id FROM sessions INDEXED BY sessions_warm"
                " WHERE tokenizer = ? AND cold_bytes = 0 AND updated < ? AND leaf IS NOT NULL"
                f" AND (? IS NULL OR ? IN (scope, {TENANT_SQL}))"
                " ORDER BY updated, pk LIMIT ?",
                (self._mine, before, scope, scope, limit),
            )
            return [self._sessions.info(SessionRow(*row)) for row in rows]

    def page(
        self, before: float, after: Place, limit: int, holds: Callable[[Node], bool]
    ) -> list[IdleSession]:
        """At most `limit` sessions with tokens, last used before a Unix time, that follow `after`;
        the least recently used first. `holds`: whether a segment has rows, in RAM or on disk. The
        lock is released between sessions, of which a long one takes more than a millisecond."""
        state = self._state
        with state.locked():
            rows = state.catalog.rows(_PAGE, (self._mine, *after, before, limit))
        found = []
        for updated, pk, id, scope, copied, base, leaf in rows:
            has_rows = True
            if copied is not None:
                with state.locked():
                    has_rows = _has_rows(state, pk, leaf, base, holds)
            found.append(IdleSession((updated, pk), id, scope, copied is not None, has_rows))
        return found

    def frozen(self) -> list[tuple[str, str]]:
        """(id, scope) of every frozen session."""
        with self._state.locked():
            return self._state.catalog.rows(
                "SELECT id, scope FROM sessions WHERE tokenizer = ? AND cold_bytes > 0",
                (self._mine,),
            )

    def coded(self, after: int, limit: int, scope: str | None = None) -> list[CodedSession]:
        """Sessions, of one tenant or scope or of all, that have a blob, in order of their rows,
        which follow row `after`."""
        with self._state.locked():
            rows = self._state.catalog.rows(_CODED, (self._mine, after, scope, scope, limit))
        return [CodedSession(*row) for row in rows]

    def blob(self, pk: int) -> bytes:
        """The blob of a session's row; empty if it has none."""
        with self._state.locked():
            rows = self._state.catalog.rows("SELECT blob FROM blobs WHERE session = ?", (pk,))
        return b"".join(blob for (blob,) in rows)

    def named(self, id: str, scope: str) -> str | None:
        """`id` if it names a frozen session; otherwise None."""
        with self._state.locked():
            found = self._sessions.lookup(id, scope)
            is_frozen = found is not None and self._sessions.info(found).cold_bytes > 0
        return id if is_frozen else None

    def continued_by(self, prompt: bytes, scope: str) -> str | None:
        """The id of the frozen session that a prompt (int32 LE) most likely continues; None
        if a warm session matches further."""
        with self._state.locked():
            scopes = [scope, *self._sessions.other_scopes(scope)]
        found = [each for of in scopes if (each := self._longest_frozen(prompt, of))]
        if not found:
            return None
        n, cold = max(found, key=itemgetter(0))
        with self._state.locked():
            return self._unless_warm(prompt, scope, n, cold)

    def _longest_frozen(
        self, prompt: bytes, scope: str
    ) -> tuple[int, tuple[float, int, str]] | None:
        """How many tokens of a prompt the frozen session of `scope` has that has most of them, and
        its (last use, pk, id)."""
        hashes = prefix_hashes(prompt, scope)
        with self._state.locked():
            for n, pks in self._prefix_hashes.find(hashes):
                if n < RECOGNISED_TOKENS_MIN:
                    break
                youngest = heapq.nlargest(CANDIDATES_MAX, pks)
                found = [each for pk in youngest if (each := self._frozen_in(pk, scope))]
                if found:
                    return n, max(found, key=itemgetter(0, 1))
        return None

    def read(self, id: str, scope: str | None = None) -> FrozenSession | None:
        """A frozen session, its bytes checked; None if it is not frozen. Raises NotFound,
        StoreError (the id is ambiguous), ThawError (damaged)."""
        with self._state.locked():
            session = self._sessions.find(id, scope)
            found = self._read(session, frozen=True)
            if found is None and self._sessions.info(session).cold_bytes:
                raise damaged_session(id, "its coded tokens are gone from the catalog")
            return found

    # --- freezing -------------------------------------------------------------------------

    def take(self, id: str, scope: str | None = None) -> WarmSession | None:
        """Read a session's content for coding; None if it is frozen already. Raises NotFound,
        StoreError (ambiguous), InvalidRequest (no turns)."""
        with self._state.locked():
            session = self._sessions.find(id, scope)
            if self._sessions.info(session).cold_bytes:
                return None
            nodes = self._state.tree.nodes
            taken = copy_history(self._sessions, session, nodes, self._bases)
            if not taken.turns:
                raise InvalidRequest(f"Session {id!r} has no turns: there is nothing to freeze.")
            first = nodes.get(taken.turns[0][2])
            needs = OtherUsers(self._state, session.pk)
            base = None if first is None else common_base(needs, first, taken.nodes)
            return WarmSession(session, taken, base, 0 if base is None else base.p1)

    def copy_of(self, warm: WarmSession) -> FrozenSession | None:
        """The copy of a session in coded form; None if there is none of exactly these turns, or
        it is damaged."""
        with self._state.locked():
            self._check_same(warm)
            try:
                copy = self._read(warm.session, frozen=False)
                return copy if copy is not None and copy.turn_ids() == warm.turn_ids else None
            except ThawError:
                return None

    def put(self, warm: WarmSession, history: History, blob: bytes) -> FrozenSession:
        """Store the blob of a session beside its tokens; durable. Returns it as it was read back.

        Raises SessionBusy if the session was continued meanwhile, and DiskFull."""
        turns = encode_turns(warm.turn_ids, history.turns)
        marks = history_prefix_hashes(history, warm.taken.info.scope)
        digest = row_digest(warm.n_base, turns, marks, blob)
        with self._state.locked():
            self._check_same(warm)
            self.is_empty = False
            base = None if warm.base is None else warm.base.id
            with self._state.catalog.transaction():
                insert, pk = self._state.catalog.insert, warm.session.pk
                self._forget_rows(pk)
                facts = {"turns": turns, "marks": marks, "digest": digest}
                insert("cold", session=pk, base=base, n_base=warm.n_base, **facts)
                insert("blobs", session=pk, blob=blob)
            copy = self._read(warm.session, frozen=False)
        assert copy is not None
        return copy

    def drop(
        self,
        warm: WarmSession,
        copy: FrozenSession,
        may_drop: Callable[[Sequence[Node]], bool],
    ) -> list[Node]:
        """Freeze a session whose `copy` was verified: empty its turns and remove the segments
        that nothing else needs, in one transaction. Returns the removed nodes.
        `may_drop(doomed)` is called under the lock.

        Raises SessionBusy (continued meanwhile, or not allowed), DiskFull or StoreError; nothing is
        then changed."""
        state, pk = self._state, warm.session.pk
        with self._state.locked():
            self._check_same(warm)
            found = state.catalog.rows(_COPY, (pk, copy.digest))
            if not found:
                raise _changed(warm.session)
            marks, base = found[0]
            doomed = unneeded(
                OtherUsers(state, pk), own_nodes(state, pk), state.tree.nodes.get(base)
            )
            if not may_drop(doomed):
                raise SessionBusy(f"Session {warm.session.id!r} is in use: freeze it later.")
            files = unviewed(state.tree, doomed)
            # the blob is about to be all there is: the journal, too, has it before that
            state.catalog.sync_journal()
            with state.catalog.transaction():
                state.catalog.run(
                    "UPDATE turns SET prompt_node = NULL, reply_node = NULL, tail = x''"
                    " WHERE session = ?",
                    (pk,),
                )
                state.catalog.run("UPDATE cold SET frozen = 1 WHERE session = ?", (pk,))
                state.catalog.run(
                    "UPDATE sessions SET cold_bytes ="
                    " (SELECT length(blob) FROM blobs WHERE session = pk) WHERE pk = ?",
                    (pk,),
                )
                foreign = delete(state, doomed, files)
            self._prefix_hashes.add(pk, marks)
            forget(state, doomed, files, foreign)
        return doomed

    def recode(self, frozen: FrozenSession, blob: bytes, context: Context) -> None:
        """Replace the blob of a frozen session with another one, after `context`, of the same tokens; durable.
        Does nothing if the session was thawed or recoded meanwhile, or the context is gone."""
        state, pk = self._state, frozen.session.pk
        with self._state.locked():
            now = self._read(frozen.session, frozen=True)
            node = context.node
            if now is None or now.digest != frozen.digest or (node is not None and node.removed):
                return
            ((marks,),) = state.catalog.rows("SELECT marks FROM cold WHERE session = ?", (pk,))
            digest = row_digest(context.n, frozen.turns, marks, blob)
            with state.catalog.transaction():
                state.catalog.run(
                    "UPDATE cold SET base = ?, n_base = ?, digest = ? WHERE session = ?",
                    (None if node is None else node.id, context.n, digest, pk),
                )
                state.catalog.run("UPDATE blobs SET blob = ? WHERE session = ?", (blob, pk))
                state.catalog.run(
                    "UPDATE sessions SET cold_bytes = ? WHERE pk = ?", (len(blob), pk)
                )

    # --- thawing --------------------------------------------------------------------------

    def restore(self, frozen: FrozenSession, history: History) -> bool:
        """Give the turns of a frozen session their tokens back, in one transaction; its blob
        stays as a copy if it has all turns. False if the session was thawed, refrozen or recoded
        since it was read. Raises DiskFull."""
        pk, scope = frozen.session.pk, frozen.info.scope
        with self._state.locked():
            if not self._state.catalog.rows(_IS_STILL, (pk, frozen.digest)):
                return False
            with self._state.growing() as growth:
                for place, turn_id in enumerate(frozen.turn_ids()):
                    turn, data = history.turns[place], history.ids(place).tobytes()
                    self._give_back(growth, turn_id, data, scope, turn.n_prompt, turn.n_cached)
                self._thawed(pk, keep_copy=not frozen.was_continued)
            self._prefix_hashes.discard(pk)
            self._keep_thawed()
        return True

    def recover(self, id: str, scope: str, prompt: bytes) -> bool:
        """Restore the tokens of a frozen session that cannot be decoded from a prompt (int32
        LE) that begins with all of them. The hash in the session's blob, or else its prefix
        hashes, prove the match; returns whether it matched. Raises DiskFull."""
        with self._state.locked():
            session = self._sessions.lookup(id, scope)
            if session is None or not self._sessions.info(session).cold_bytes:
                return False
            scope = self._sessions.info(session).scope  # it may be continued under other adapters
            turns = self._state.catalog.rows(_WITHOUT_TOKENS, (session.pk,))
            if not self._has_said(session, scope, turns, prompt):
                return False
            with self._state.growing() as growth:
                for turn_id, n_prompt, n, n_cached in turns:
                    data = prompt[: n * ID_BYTES]
                    self._give_back(growth, turn_id, data, scope, n_prompt, n_cached)
                self._thawed(session.pk, keep_copy=False)
            self._prefix_hashes.discard(session.pk)
            self._keep_thawed()
        return True

    def read_again(self, sessions: Collection[int]) -> None:
        """Note that other processes changed the rows of these sessions. Runs under the lock."""
        self.is_empty = False
        for pk in sessions:
            self._prefix_hashes.discard(pk)
            for row in prefix_hash_rows(self._state, pk):
                self._prefix_hashes.add(*row)

    def forget(self, session: int) -> None:
        """Remove a deleted session from recognition. Runs under the lock."""
        self._prefix_hashes.discard(session)

    # --- checking -------------------------------------------------------------------------

    def damaged(self) -> Iterator[str]:
        """What is inconsistent in each frozen session. The lock is released between sessions."""
        for row in self.frozen():
            try:
                frozen = self.read(*row)
                if frozen is not None:
                    frozen.turn_ids()
            except NotFound:
                continue  # removed since the list was made
            except StoreError as error:
                yield str(error)

    # --- inside ---------------------------------------------------------------------------

    def _read(self, session: SessionRow, *, frozen: bool) -> FrozenSession | None:
        nodes = self._state.tree.nodes

        def prefix(segment: int) -> bytes:
            return nodes[segment].prefix_bytes() if segment in nodes else b""

        bases = partial(visible_bases, self._bases)
        return read_coded(self._sessions, session, prefix, bases, frozen=frozen)

    def _check_same(self, warm: WarmSession) -> None:
        """Raises SessionBusy unless the session is unchanged since it was read."""
        known = self._sessions.lookup(warm.session.id, warm.taken.info.scope)
        is_same = known == warm.session and self._has_turns_of(warm)
        is_base_there = warm.base is None or not warm.base.removed
        if not is_same or not is_base_there or self._sessions.info(warm.session).cold_bytes:
            raise _changed(warm.session)

    def _has_turns_of(self, warm: WarmSession) -> bool:
        """Row ids are reused: another session with this name may have replaced the removed one."""
        return turn_rows(self._state.catalog, warm.session) == warm.taken.turns

    def _has_said(
        self, session: SessionRow, scope: str, turns: list[tuple[int, int, int, int]], prompt: bytes
    ) -> bool:
        """Whether each of `turns` (id, n_prompt, n, n_cached) is the beginning of `prompt`."""
        n_all = max((n for _, _, n, _ in turns), default=0)
        fits = all(0 <= n_prompt <= n and 0 <= n_cached <= n for _, n_prompt, n, n_cached in turns)
        rows = self._state.catalog.rows(
            "SELECT n_base, marks, blob FROM cold LEFT JOIN blobs USING (session)"
            " WHERE session = ?",
            (session.pk,),
        )
        if not rows or not fits or not 0 < n_all * ID_BYTES <= len(prompt):
            return False
        n_base, marks, blob = rows[0]
        own = ids_array(prompt[n_base * ID_BYTES : n_all * ID_BYTES])
        if container.claimed_hash(blob or b"") == ids_hash(own):
            return True
        ends = turn_ends((n_prompt, n_cached) for _, n_prompt, _, n_cached in turns)
        return bool(ends) and encode_prefix_hashes(prefix_hashes_at(prompt, scope, ends)) == marks

    def _give_back(
        self, growth: Growth, turn_id: int, data: bytes, scope: str, n_prompt: int, n_cached: int
    ) -> None:
        """Restore a turn's tokens, in a transaction."""
        ends = growth.grow_turn(data, scope, n_prompt, n_cached)
        self._state.catalog.run(
            "UPDATE turns SET prompt_node = ?, reply_node = ?, tail = ? WHERE id = ?",
            (ends[0].id or None, ends[1].id or None, data[n_cached * ID_BYTES :], turn_id),
        )

    def _thawed(self, pk: int, *, keep_copy: bool) -> None:
        """All turns have their tokens again: the blob is a copy, or deleted, in a transaction."""
        if keep_copy:
            self._state.catalog.run("UPDATE cold SET frozen = 0 WHERE session = ?", (pk,))
        else:
            self._forget_rows(pk)
        self._state.catalog.run("UPDATE sessions SET cold_bytes = 0 WHERE pk = ?", (pk,))

    def _keep_thawed(self) -> None:
        """Make sure of the tokens in the journal, too, before the next turn takes the blob away. A journal
        that lacks changes keeps the blob."""
        with suppress(StoreError):
            self._state.catalog.sync_journal()

    def _forget_rows(self, pk: int) -> None:
        self._state.catalog.run("DELETE FROM blobs WHERE session = ?", (pk,))
        self._state.catalog.run("DELETE FROM cold WHERE session = ?", (pk,))

    def _frozen_in(self, pk: int, scope: str) -> tuple[float, int, str] | None:
        """(last use, pk, id) of a frozen session of `scope`."""
        rows = self._state.catalog.rows(
            "SELECT updated, pk, id FROM sessions WHERE pk = ? AND scope = ? AND tokenizer = ?"
            " AND cold_bytes > 0",
            (pk, scope, self._mine),
        )
        return rows[0] if rows else None

    def _unless_warm(
        self, prompt: bytes, scope: str, n: int, cold: tuple[float, int, str]
    ) -> str | None:
        """The frozen session, unless a warm one matches further, or as far and was used later."""
        others = self._sessions.other_scopes(scope)
        known = self._state.tree.matched(prompt, scope, others)
        deeper = list(takewhile(lambda node: node.p1 >= n, known))
        warm = self._sessions.recognise(deeper, scope)
        if warm is None:
            return cold[2]
        is_deeper = self._sessions.recognise([e for e in deeper if e.p1 > n], scope) is not None
        if is_deeper or self._sessions.info(warm).updated >= cold[0]:
            return None
        return cold[2]


def _changed(session: SessionRow) -> SessionBusy:
    return SessionBusy(f"Session {session.id!r} changed meanwhile: freeze it again.")
