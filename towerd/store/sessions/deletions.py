"""What was deleted while a request ran, so that its turn brings none of it back.

A request sends the whole conversation and records it when its answer has ended. If the conversation
was deleted in between, the turn would enter all of it again, under the same name or as a new
session. Imports take time as well. Both therefore ask what was deleted since they began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

from towerd.store.sessions.prefix_hashes import HASH_BYTES, prefix_hashes
from towerd.store.tree.node import Node
from towerd.store.tree.scope import tenant_of

DELETED_META = "deleted"
"""The key of the catalog's note that copies of something deleted may be where only `gc` looks."""


class Deletion(NamedTuple):
    """One session that was deleted."""

    tokenizer: int
    """The row of its tokenizer."""
    scope: str
    id: str
    hashes: Collection[int]
    """Prefix hashes of the places where its prompts and replies ended."""
    at: float
    """When it was durable, by the monotonic clock, which all processes of a machine have in common."""


class DeletionWatch:
    """What was deleted since it was made. The store's lock is held around every call."""

    __slots__ = ("__weakref__", "_began", "_hashes", "_names")

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._names: set[tuple[int, str, str]] = set()
        self._hashes: dict[tuple[int, str], set[int]] = {}

    def note(self, deletion: Deletion) -> None:
        """A session was deleted. One that another process deleted before this watch was made may be
        told only now, and is nothing to it: the name may have been given to a new session since."""
        if deletion.at < self._began:
            return
        tokenizer, scope = deletion.tokenizer, deletion.scope
        self._names.add((tokenizer, tenant_of(scope), deletion.id))
        self._hashes.setdefault((tokenizer, scope), set()).update(deletion.hashes)

    def has_named(self, tokenizer: int, scope: str, id: str) -> bool:
        """Whether the session of this name was deleted, under whatever adapters."""
        return (tokenizer, tenant_of(scope), id) in self._names

    def deepest(self, tokenizer: int, ids: bytes, scope: str) -> int:
        """How many leading tokens of `ids` (int32 LE) were a whole prompt or reply of a session
        of this tenant that was deleted; 0 for none."""
        mine, longest = (tokenizer, tenant_of(scope)), 0
        for (whose, of), known in self._hashes.items():
            if (whose, tenant_of(of)) == mine and known:
                found = np.isin(prefix_hashes(ids, of), np.array(sorted(known), np.uint64))
                longest = max(longest, int(np.flatnonzero(found)[-1]) + 1 if found.any() else 0)
        return longest


class Deletions:
    """Tells every watch in use what is deleted."""

    def __init__(self) -> None:
        self._watches: WeakSet[DeletionWatch] = WeakSet()
        self._changing = threading.Lock()

    def watch(self) -> DeletionWatch:
        """A new watch, which is told for as long as somebody has it. From any thread; never waits."""
        made = DeletionWatch()
        with self._changing:
            self._watches.add(made)
        return made

    def note(self, deletion: Deletion) -> None:
        """A session was deleted. Runs under the store's lock."""
        with self._changing:
            watches = list(self._watches)
        for each in watches:
            each.note(deletion)


def hashes_at(ends: Iterable[Node], scope: str) -> set[int]:
    """The prefix hashes at the ends of nodes; one pass over the tokens of each branch."""
    left = {node.id: node for node in ends}
    found: set[int] = set()
    for node in sorted(left.values(), key=lambda node: -node.p1):
        if node.id not in left:
            continue
        hashes = prefix_hashes(node.prefix_bytes(), scope)
        for each in node.path():
            if left.pop(each.id, None) is not None:
                found.add(int(hashes[each.p1 - 1]))
    return found


def decode_hashes(data: bytes) -> set[int]:
    """Prefix hashes as the catalog keeps those of frozen sessions."""
    whole = len(data) // HASH_BYTES * HASH_BYTES
    return set(np.frombuffer(data[:whole], "<u8").tolist())
