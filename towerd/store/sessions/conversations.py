"""Conversations of OpenAI's API: items by name, which responses take for their context and add to."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from towerd.errors import InvalidRequest, NotFound
from towerd.store.catalog.catalog import Catalog
from towerd.store.files.disk_limit import DiskLimit
from towerd.store.sessions.deletions import DELETED_META
from towerd.store.sessions.json_blob import pack, unpack

Locked: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Holds the store's lock; raises StoreError if the store is closed."""


@dataclass(frozen=True, slots=True)
class ContextItem:
    """One item: a message, a call of a tool or what it returned, reasoning."""

    name: str
    """Its public id."""
    body: bytes
    """JSON, with the id in it."""
    is_named: bool = True
    """Whether its client gave the id."""

    def renamed(self, name: str) -> ContextItem:
        """The same with another id."""
        body = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        body["id"] = msgspec.Raw(msgspec.json.encode(name))
        return ContextItem(name, msgspec.json.encode(body), self.is_named)


PackedItem: TypeAlias = tuple[ContextItem, bytes]
"""An item, and its body as the catalog keeps it."""


def packed(items: Iterable[ContextItem]) -> list[PackedItem]:
    """Items ready to be appended. Compresses: call it without the store's lock."""
    return [(item, pack(item.body)) for item in items]


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What a response follows, and where that is kept."""

    items: Sequence[bytes] = ()
    """JSON of each item, oldest first."""
    parent: int | None = None
    """The row of the response that it continues."""
    n_shared: int | None = None
    """How many of the items of `parent` it follows; None: all."""
    conversation: int | None = None
    """The row of its conversation."""
    last_item: int = 0
    """The row of the conversation's last item; 0 if it is empty."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as it is shown."""

    name: str
    metadata: str
    """A JSON object."""
    created: float


@dataclass(frozen=True, slots=True)
class ConversationTable:
    """The conversations of all tenants. Thread-safe; every change is durable when its method returns.
    Every method with a name raises NotFound unless the tenant has it."""

    catalog: Catalog
    locked: Locked
    clock: Callable[[], float]
    limit: DiskLimit

    def create(self, scope: str, metadata: str, items: Sequence[ContextItem]) -> Conversation:
        """A new conversation with these items. Raises InvalidRequest if two of one id differ, or
        DiskLimitReached."""
        self.limit.check()
        name, now, added = "conv_" + secrets.token_hex(24), self.clock(), packed(items)
        with self.locked(), self.catalog.transaction():
            facts = {"scope": scope, "name": name, "metadata": metadata, "created": now}
            pk = self.catalog.insert("conversations", **facts)
            append_items(self.catalog, pk, added, now, renames=False)
        return Conversation(name, metadata, now)

    def get(self, scope: str, name: str) -> Conversation:
        """The conversation of this name."""
        with self.locked():
            row = self._row(scope, name)
        return Conversation(name, row["metadata"], row["created"])

    def set_metadata(self, scope: str, name: str, metadata: str) -> Conversation:
        """Replace what a client notes of a conversation."""
        with self.locked(), self.catalog.transaction():
            row = self._row(scope, name)
            self.catalog.run(
                "UPDATE conversations SET metadata = ? WHERE id = ?", (metadata, row["id"])
            )
        return Conversation(name, metadata, row["created"])

    def delete(self, scope: str, name: str) -> None:
        """Delete a conversation and its items. Its responses stay, but cannot be continued."""
        with self.locked(), self.catalog.transaction():
            forget_conversations(self.catalog, [self._row(scope, name)["id"]])

    def context(self, scope: str, name: str) -> ResponseContext:
        """What a response in this conversation follows."""
        with self.locked():
            pk = self._row(scope, name)["id"]
            rows = self.catalog.sealed("conversation_items", "conversation = ? ORDER BY id", (pk,))
        last = rows[-1]["id"] if rows else 0
        items = [unpack(row["body"]) for row in rows]
        return ResponseContext(items, conversation=pk, last_item=last)

    def page(
        self, scope: str, name: str, after: str, limit: int, *, oldest_first: bool
    ) -> tuple[list[bytes], bool]:
        """At most `limit` items behind the one of the name `after`, in order, and whether there are
        more."""
        with self.locked():
            pk = self._row(scope, name)["id"]
            order, beyond = ("ASC", ">") if oldest_first else ("DESC", "<")
            where, params = "conversation = ?", [pk]
            if after:
                where += f" AND id {beyond} ?"
                params.append(self._item(pk, after)["id"])
            rows = self.catalog.sealed(
                "conversation_items", f"{where} ORDER BY id {order} LIMIT ?", (*params, limit + 1)
            )
        return [unpack(row["body"]) for row in rows[:limit]], len(rows) > limit

    def item(self, scope: str, name: str, item: str) -> bytes:
        """One item, JSON."""
        with self.locked():
            return unpack(self._item(self._row(scope, name)["id"], item)["body"])

    def add_items(self, scope: str, name: str, items: Sequence[ContextItem]) -> None:
        """Add items at the end. Raises InvalidRequest if it has another one of the same id, or DiskLimitReached."""
        self.limit.check()
        added = packed(items)
        with self.locked(), self.catalog.transaction():
            pk = self._row(scope, name)["id"]
            append_items(self.catalog, pk, added, self.clock(), renames=False)

    def delete_item(self, scope: str, name: str, item: str) -> Conversation:
        """Delete an item; returns its conversation. Later responses do not follow it."""
        with self.locked(), self.catalog.transaction():
            row = self._row(scope, name)
            found = self._item(row["id"], item)
            self.catalog.run("DELETE FROM conversation_items WHERE id = ?", (found["id"],))
            note_deletion(self.catalog)
        return Conversation(name, row["metadata"], row["created"])

    def _row(self, scope: str, name: str) -> dict[str, Any]:
        rows = self.catalog.sealed("conversations", "scope = ? AND name = ?", (scope, name))
        if not rows:
            raise NotFound(f"Conversation with id '{name[:100]}' not found.")
        return rows[0]

    def _item(self, conversation: int, item: str) -> dict[str, Any]:
        where = "conversation = ? AND name = ?"
        rows = self.catalog.sealed("conversation_items", where, (conversation, item))
        if not rows:
            raise NotFound(f"Item with id '{item[:100]}' not found.")
        return rows[0]


def append_items(
    catalog: Catalog,
    conversation: int,
    items: Sequence[PackedItem],
    now: float,
    session: int | None = None,
    *,
    renames: bool = True,
) -> None:
    """Add items to a conversation, inside a transaction; those that it has already are not repeated. Another
    one of the same id gets an id of its own; unless `renames`, it raises InvalidRequest."""
    catalog.run_many(
        "INSERT INTO conversation_items(conversation, session, name, body, created)"
        " VALUES (?, ?, ?, ?, ?)",
        [
            (conversation, session, item.name, blob, now)
            for item, blob in _new_items(catalog, conversation, items, renames=renames)
        ],
    )


def _new_items(
    catalog: Catalog, conversation: int, items: Sequence[PackedItem], *, renames: bool
) -> Iterator[PackedItem]:
    """Those that a conversation does not have, each with an id that is new there."""
    names = msgspec.json.encode([item.name for item, _ in items]).decode()
    where = "conversation = ? AND name IN (SELECT value FROM json_each(?))"
    rows = catalog.sealed("conversation_items", where, (conversation, names))
    known = {row["name"]: [msgspec.json.decode(unpack(row["body"]))] for row in rows}
    for item, blob in items:
        body, alike = msgspec.json.decode(item.body), known.setdefault(item.name, [])
        if body in alike:
            continue
        alike.append(body)
        if len(alike) == 1:
            yield item, blob
        elif not renames:
            raise InvalidRequest(
                f"Another item with id '{item.name[:100]}' is in the conversation already",
                param="items",
            )
        else:
            other = item.renamed(f"{item.name}_{secrets.token_hex(8)}")
            yield other, pack(other.body)


def forget_conversations(catalog: Catalog, rows: Sequence[int]) -> None:
    """Delete conversations and their items, inside a transaction."""
    for pk in rows:
        catalog.run("UPDATE responses SET conversation = NULL WHERE conversation = ?", (pk,))
        catalog.run("DELETE FROM conversation_items WHERE conversation = ?", (pk,))
        catalog.run("DELETE FROM conversations WHERE id = ?", (pk,))
    if rows:
        note_deletion(catalog)


def note_deletion(catalog: Catalog) -> None:
    """Let the next gc erase copies of what is deleted in this transaction."""
    catalog.run("INSERT OR REPLACE INTO meta(key, value) VALUES (?, '')", (DELETED_META,))
