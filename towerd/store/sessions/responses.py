"""Responses of OpenAI's API, each with the items that it was given, in chains.

A response names the one that it continues, so each item is kept once: also where a client sends the whole
conversation each time, of which most is in the response before. Of a deleted response that
a later one needs, the items stay as a hidden part of that one's context, until the last of these is deleted as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import msgspec

from towerd.errors import InvalidRequest, NotFound
from towerd.store.catalog.catalog import Catalog
from towerd.store.files.disk_limit import DiskLimit
from towerd.store.sessions.conversations import (
    ContextItem,
    ConversationTable,
    Locked,
    ResponseContext,
    append_items,
    forget_conversations,
    note_deletion,
    packed,
)
from towerd.store.sessions.json_blob import pack, unpack

_UNNEEDED = """
WITH RECURSIVE
    gone(id) AS (
        SELECT id FROM responses WHERE {whose} AND hidden = 1
        UNION SELECT above.id FROM gone JOIN responses AS each ON each.id = gone.id
        JOIN responses AS above ON above.id = each.parent WHERE above.hidden = 1
    ),
    needed(id) AS (
        SELECT each.parent FROM gone JOIN responses AS each ON each.parent = gone.id
        WHERE each.id NOT IN (SELECT id FROM gone)
        UNION SELECT each.parent FROM needed JOIN responses AS each ON each.id = needed.id
        WHERE each.parent IS NOT NULL
    )
DELETE FROM responses WHERE id IN (SELECT id FROM gone) AND id NOT IN (SELECT id FROM needed)
"""
"""Hidden responses, and hidden ones that they continue, which no other response continues. Every other
hidden one is continued by one that is not."""


_CONVERSATIONS = """
SELECT id FROM conversations AS each WHERE (? IS NULL OR scope = ?) AND (? IS NULL OR (
    coalesce((SELECT max(created) FROM conversation_items WHERE conversation = each.id), created) < ?
    AND NOT EXISTS (SELECT 1 FROM conversation_items WHERE conversation = each.id AND session IS NOT NULL)))
"""
_RESPONSES = """
WITH RECURSIVE
    used(id) AS (
        SELECT id FROM responses WHERE ? IS NOT NULL AND (created >= ? OR session IS NOT NULL)
        UNION SELECT parent FROM used JOIN responses USING (id) WHERE parent IS NOT NULL
    )
SELECT id FROM responses WHERE hidden = 0 AND (? IS NULL OR scope = ?) AND id NOT IN used ORDER BY id
"""
"""Those that are old, and continued by old ones alone. A response with a session goes with that."""


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A finished response, to be kept or to be added to its conversation."""

    scope: str
    """The tenant."""
    name: str
    context: ResponseContext
    input: Sequence[ContextItem]
    """Its own items."""
    output: Sequence[ContextItem]
    body: bytes
    """The object that its client gets, JSON; empty: it is not kept."""


class _KeptObject(msgspec.Struct, frozen=True):
    output: list[msgspec.Raw] = []


_items = msgspec.json.Decoder(list[msgspec.Raw])
_body = msgspec.json.Decoder(_KeptObject)


@dataclass(frozen=True, slots=True)
class ResponseTable:
    """The responses of all tenants. Thread-safe; every change is durable when its method returns. Every
    method with a name raises NotFound unless the tenant has it."""

    catalog: Catalog
    locked: Locked
    clock: Callable[[], float]
    limit: DiskLimit

    @property
    def conversations(self) -> ConversationTable:
        """The conversations that responses are made in."""
        return ConversationTable(self.catalog, self.locked, self.clock, self.limit)

    def add(
        self,
        new: NewResponse,
        session: int | None,
        was_deleted: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Keep a response, and add its items to its conversation. session: the row of the session that
        its turn was recorded in; was_deleted: whether that session was, asked under the store's lock: its
        row may be another one's by now. Returns False and keeps nothing if that, or what it continues, was deleted.
        Compresses: call it without the lock."""
        own, body = pack(_array(item.body for item in new.input)), pack(new.body)
        context, now = new.context, self.clock()
        is_said = context.conversation is not None
        added = packed((*new.input, *new.output)) if is_said else []
        with self.locked(), self.catalog.transaction():
            if was_deleted() or not self._is_there(new, session):
                return False
            if context.conversation is not None:
                append_items(self.catalog, context.conversation, added, now, session)
            if new.body:
                self.catalog.insert(
                    "responses",
                    scope=new.scope,
                    name=new.name,
                    parent=context.parent,
                    n_shared=context.n_shared,
                    conversation=context.conversation,
                    last_item=context.last_item,
                    session=session,
                    input=own,
                    body=body,
                    created=now,
                )
        return True

    def keep(self, new: NewResponse, session: int, was_deleted: Callable[[], bool]) -> bool:
        """As `add`, with what the response has in common with the session's last one kept once."""
        short = self.sharing(new, session)
        if self.add(short, session, was_deleted):
            return True
        return short is not new and self.add(new, session, was_deleted)

    def sharing(self, new: NewResponse, session: int) -> NewResponse:
        """The same response, without those of its first items that are those of the last response of its
        session."""
        if new.context != ResponseContext() or len(new.input) < 2 or not new.body:
            return new
        with self.locked():
            where = "session = ? AND scope = ? ORDER BY id DESC LIMIT 1"
            rows = self.catalog.sealed("responses", where, (session, new.scope))
            chain = self._chain(rows[0]["id"]) if rows else _ResponseChain((), ())
        if not chain.responses or chain.responses[0]["last_item"]:
            return new  # items of a conversation can be deleted
        n = _n_same(new.input, chain.items(with_output=True))
        if n == 0:
            return new
        context = ResponseContext(parent=rows[0]["id"], n_shared=n)
        return replace(new, context=context, input=new.input[n:])

    def session_of(self, context: ResponseContext) -> int | None:
        """The row of the session of what a response follows; None: it has none."""
        sql, pk = "SELECT session FROM responses WHERE id = ?", context.parent
        if pk is None:
            sql = "SELECT session FROM conversation_items WHERE conversation = ? AND session IS NOT NULL"
            sql, pk = sql + " ORDER BY id DESC LIMIT 1", context.conversation
        with self.locked():
            rows = self.catalog.rows(sql, (pk,))
        return rows[0][0] if rows else None

    def body(self, scope: str, name: str) -> bytes:
        """The object of a response, JSON."""
        with self.locked():
            return unpack(self._row(scope, name)["body"])

    def context(self, scope: str, name: str) -> ResponseContext:
        """What a response that continues this one follows. Raises InvalidRequest if the conversation
        that this one was made in is deleted."""
        with self.locked():
            row = self._row(scope, name)
            chain = self._chain(row["id"])
        if chain.is_cut:
            raise InvalidRequest(
                f"Response with id '{name}' cannot be continued: its conversation is deleted."
            )
        return ResponseContext(chain.items(with_output=True), row["id"])

    def input_items(self, scope: str, name: str) -> list[bytes]:
        """What a response was made from, oldest first: its context and its own items, JSON. Those of a
        conversation that is deleted are missing."""
        with self.locked():
            chain = self._chain(self._row(scope, name)["id"])
        return chain.items(with_output=False)

    def delete(self, scope: str, name: str) -> None:
        """Delete a response, but not what continues it."""
        with self.locked(), self.catalog.transaction():
            row = self._row(scope, name)
            _hide(self.catalog, "id = ?", row["id"])

    def _row(self, scope: str, name: str) -> dict[str, Any]:
        where = "scope = ? AND name = ? AND hidden = 0"
        rows = self.catalog.sealed("responses", where, (scope, name))
        if not rows:
            raise NotFound(f"Response with id '{name[:100]}' not found.")
        return rows[0]

    def _chain(self, pk: int) -> _ResponseChain:
        """The response of this row, and what it continues."""
        chain = self.catalog.sealed(
            "responses",
            "id IN (WITH RECURSIVE chain(id) AS (SELECT ? UNION SELECT parent FROM chain"
            " JOIN responses USING (id) WHERE parent IS NOT NULL) SELECT id FROM chain)"
            " ORDER BY id",  # each is younger than the one that it continues
            (pk,),
        )
        before: Sequence[dict[str, Any]] = ()
        if chain[0]["last_item"]:
            where = "conversation = ? AND id <= ? ORDER BY id"
            params = chain[0]["conversation"], chain[0]["last_item"]
            before = self.catalog.sealed("conversation_items", where, params)
        return _ResponseChain(before, chain)

    def _is_there(self, new: NewResponse, session: int | None) -> bool:
        """Whether what a response follows, and its session, are still there."""
        context = new.context
        known = "SELECT 1 FROM sessions WHERE pk = ?"
        if session is not None and not self.catalog.rows(known, (session,)):
            return False
        for table, pk in (("responses", context.parent), ("conversations", context.conversation)):
            sql = f"SELECT 1 FROM {table} WHERE id = ? AND scope = ?"
            if pk is not None and not self.catalog.rows(sql, (pk, new.scope)):
                return False
        return True


@dataclass(frozen=True, slots=True)
class _ResponseChain:
    """Rows of responses, of which each continues the one before, to be read without the store's lock."""

    before: Sequence[dict[str, Any]]
    """The items of its conversation that the first one followed."""
    responses: Sequence[dict[str, Any]]

    @property
    def is_cut(self) -> bool:
        """Whether the conversation that the first one was made in is deleted."""
        return bool(self.responses[0]["last_item"]) and self.responses[0]["conversation"] is None

    def items(self, *, with_output: bool) -> list[bytes]:
        """All items, oldest first, with or without what the last one put out."""
        items, n_input = [unpack(row["body"]) for row in self.before], 0
        for each in self.responses:
            if each["n_shared"] is not None:
                del items[each["n_shared"] :]
            items += _split(each["input"])
            n_input = len(items)
            items += map(bytes, _body.decode(unpack(each["body"])).output)
        return items if with_output else items[:n_input]


def forget_session(catalog: Catalog, session: int) -> None:
    """Delete the responses whose turns are those of a session, and the conversations that it was said
    in, inside the transaction that deletes the session."""
    rows = catalog.rows(
        "SELECT DISTINCT conversation FROM conversation_items WHERE session = ?", (session,)
    )
    forget_conversations(catalog, [pk for (pk,) in rows])
    _hide(catalog, "session = ?", session)
    catalog.run("UPDATE responses SET session = NULL WHERE session = ?", (session,))


def without_session(
    catalog: Catalog, scope: str | None, before: float | None
) -> dict[str, list[int]]:
    """The rows of `responses` and `conversations` of a tenant (None: of all) that are not used since a time, and that no
    session has; without a time all of them. Under the lock."""
    conversations = catalog.rows(_CONVERSATIONS, (scope, scope, before, before))
    responses = catalog.rows(_RESPONSES, (before, before, scope, scope))
    return {
        "conversations": [pk for (pk,) in conversations],
        "responses": [pk for (pk,) in responses],
    }


def forget_responses(
    catalog: Catalog, locked: Locked, scope: str | None, before: float | None
) -> dict[str, int]:
    """Delete what `without_session` finds. Returns how many of each."""
    with locked(), catalog.transaction():
        found = without_session(catalog, scope, before)
        forget_conversations(catalog, found["conversations"])
    for pk in found["responses"]:  # each alone, as it may be long
        with locked(), catalog.transaction():
            _hide(catalog, "id = ?", pk)
    return {name: len(rows) for name, rows in found.items()}


def _hide(catalog: Catalog, whose: str, which: int) -> None:
    """Hide responses, and delete what nothing else continues: of what is continued, all but the items."""
    catalog.run(f"UPDATE responses SET hidden = 1 WHERE {whose}", (which,))
    catalog.run(_UNNEEDED.format(whose=whose), (which,))
    hidden = catalog.rows(f"SELECT id FROM responses WHERE {whose} AND hidden = 1", (which,))
    for (pk,) in hidden:  # one at a time: a session may have many, each with a long body
        (row,) = catalog.sealed("responses", "id = ?", (pk,))
        output = _body.decode(unpack(row["body"])).output
        body = b'{"output":%s}' % _array(map(bytes, output))
        catalog.run("UPDATE responses SET body = ? WHERE id = ?", (pack(body), pk))
    note_deletion(catalog)


def _n_same(given: Sequence[ContextItem], known: Sequence[bytes]) -> int:
    """How many items two lists begin with alike."""
    pairs = zip(given, known, strict=False)
    return sum(1 for _ in takewhile(lambda pair: _was_deleted(*pair), pairs))


def _was_deleted(given: ContextItem, known: bytes) -> bool:
    mine, other = msgspec.json.decode(given.body), msgspec.json.decode(known)
    if not given.is_named:
        del mine["id"]
        other.pop("id", None)
    return bool(mine == other)


def _array(items: Any) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _split(blob: bytes) -> list[bytes]:
    return [bytes(item) for item in _items.decode(unpack(blob))]
