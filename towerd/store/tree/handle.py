"""Handle: the path of one request through the prefix tree, held until it is released."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from towerd.store.tree.scope import public_of
from towerd.store.tree.tree import Match, PrefixTree
from towerd.tokens import ID_BYTES, Ids, ids_array, ids_bytes

_CHILDREN_MAX = 100
"""Of a node, those that are looked at for one of a scope."""


class Handle:
    """What the prefix tree knows of a request's tokens.

    `match` walks the tree again only if it has changed. Neither freezing nor `gc` removes the
    path that the last call found, until `release`. Any thread may use it. It is made by
    `Store.hold`."""

    __slots__ = ("_data", "_is_released", "_locked", "_match", "_tree", "_version", "scope")

    def __init__(
        self,
        tree: PrefixTree,
        locked: Callable[[], AbstractContextManager[None]],
        ids: Ids,
        scope: str,
    ) -> None:
        """locked: takes the lock that guards `tree`."""
        self.scope = scope
        self._tree, self._locked = tree, locked
        self._data = ids_bytes(ids)
        self._match = Match((), 0)
        self._version = -1
        self._is_released = False

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def n(self) -> int:
        """The number of tokens."""
        return len(self._data) // ID_BYTES

    def match(self, n: int | None = None) -> Match:
        """The longest stored prefix of the tokens, or of the first `n`. The result is only valid
        while the store is locked: a split or a removal changes its nodes."""
        with self._locked():
            if self._version != self._tree.version:
                self._match = self._tree.match(self._data, self.scope)
                self._version = self._tree.version
                self._hold()
            return self._match if n is None else self._match.first(n)

    def beyond(self, at: int, n: int) -> Ids:
        """Up to `n` tokens with which the newest stored tower continues that this path leaves at token
        `at`; empty if none does."""
        with self._locked():
            match = self.match()
            if not match.nodes or match.n != at:
                return ids_array(b"")
            node, seen = match.nodes[-1], (self.scope, public_of(self.scope))
            found = node.ids[(match.n - node.p0) * ID_BYTES :]
            while len(found) < n * ID_BYTES:
                below = [each for each in node.newest(_CHILDREN_MAX) if each.scope in seen]
                if not below:
                    break
                node = below[0]
                found += node.ids
            return ids_array(found[: n * ID_BYTES])

    def release(self) -> None:
        """Let go of the path. Takes no lock, so it never waits."""
        self._is_released = True
        self._tree.held.pop(self, None)

    def _hold(self) -> None:
        if self._match.nodes:
            self._tree.held[self] = self._match.nodes[-1]
        else:
            self._tree.held.pop(self, None)
        if self._is_released:  # by another thread, which may have come before this
            self._tree.held.pop(self, None)
