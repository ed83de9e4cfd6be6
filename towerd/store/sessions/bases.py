"""Bases: precached prompts whose path is pinned under a name; and pins without one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from towerd.errors import NotFound
from towerd.store.sessions.sessions import check_name
from towerd.store.sessions.turn import ANYWHERE, PREFIX, Base
from towerd.store.state.state import StoreState, add_pins
from towerd.store.tree.node import Node
from towerd.store.tree.scope import public_of
from towerd.tokens import Ids, path_bytes

_ANYWHERE_JSON = "{}"
"""What the catalog's column says of a text that may stand anywhere; earlier versions kept there what
they had measured of it."""


@dataclass(slots=True)
class BaseTable:
    """The bases of an open store. Thread-safe."""

    state: StoreState
    version: int = 0
    """Changes whenever `listing` may have changed."""

    def listing(self) -> list[Base]:
        """Every base by level, scope and name."""
        with self.state.locked():
            rows = self.state.catalog.rows(
                "SELECT name, scope, level, node, n_tokens, digest, format, module FROM bases"
                " WHERE tokenizer = ? ORDER BY level, scope, name",
                (self.state.identity.tokenizer,),
            )
        return [
            replace(Base(*row[:-1]), reuse=PREFIX if row[-1] is None else ANYWHERE) for row in rows
        ]

    def _find(self, name: str, scope: str) -> Base | None:
        """The base of this name and scope."""
        named = (each for each in self.listing() if (each.name, each.scope) == (name, scope))
        return next(named, None)

    def add(
        self,
        name: str,
        ids: Ids,
        scope: str,
        level: int,
        public: bool,
        format: str | None = None,
        anywhere: bool = False,
    ) -> Base:
        """Store and pin the path of a precached prompt; idempotent. A public base belongs to
        every scope; a changed prompt moves the name to its new path. The rest: see Base."""
        check_name(name)
        data, owner = path_bytes(ids, [len(ids)]), public_of(scope) if public else scope
        digest = hashlib.blake2b(data, digest_size=32).digest()
        reuse = ANYWHERE if anywhere else PREFIX
        with self.state.locked():
            old = self._find(name, owner)
            with self.state.growing() as growth:
                node = growth.grow(data, owner, [len(ids)])[-1]
                base = Base(name, owner, level, node.id, len(ids), digest, format, reuse)
                self._put(base, growth.now)
            add_pins(node, 1)
            if old is not None:
                add_pins(self.state.tree.nodes[old.node], -1)
            self.state.touch(node)
        return base

    def _put(self, base: Base, now: float) -> None:
        self.version += 1
        run, mine = self.state.catalog.run, self.state.identity.tokenizer
        which = mine, base.scope, base.name
        run("DELETE FROM bases WHERE tokenizer = ? AND scope = ? AND name = ?", which)
        self.state.catalog.insert(
            "bases",
            tokenizer=mine,
            scope=base.scope,
            name=base.name,
            level=base.level,
            node=base.node,
            n_tokens=base.n_tokens,
            digest=base.digest,
            created=now,
            format=base.format,
            module=None if base.reuse == PREFIX else _ANYWHERE_JSON,
        )

    def remove(self, name: str, scope: str) -> None:
        """Forget a base's name and pin. Raises NotFound."""
        with self.state.locked():
            self.version += 1
            base = self._find(name, scope)
            if base is None:
                raise NotFound(f"there is no base {name!r} in scope {scope!r}")
            with self.state.catalog.transaction():
                self.state.catalog.run(
                    "DELETE FROM bases WHERE tokenizer = ? AND scope = ? AND name = ?",
                    (self.state.identity.tokenizer, scope, name),
                )
            add_pins(self.state.tree.nodes[base.node], -1)


@dataclass(frozen=True, slots=True)
class PinTable:
    """The pins of an open store: nodes that the operator keeps from eviction and gc, each with its
    whole path. Thread-safe."""

    state: StoreState

    def add(self, node_id: int) -> None:
        """Keep a node and its path. Pinning twice is pinning once. Raises NotFound."""
        with self.state.locked():
            node = self.state.node(node_id)
            if not self._has(node):
                with self.state.catalog.transaction():
                    self.state.catalog.insert("pins", node=node.id, created=self.state.clock())
                add_pins(node, 1)

    def remove(self, node_id: int) -> None:
        """Undo `add`. Raises NotFound if there is no such segment or it is not pinned."""
        with self.state.locked():
            node = self.state.node(node_id)
            if not self._has(node):
                raise NotFound(f"segment {node.id} is not pinned")
            with self.state.catalog.transaction():
                self.state.catalog.run("DELETE FROM pins WHERE node = ?", (node.id,))
            add_pins(node, -1)

    def listing(self) -> list[Node]:
        """The nodes that `add` was called for."""
        with self.state.locked():
            nodes = self.state.tree.nodes
            rows = self.state.catalog.rows("SELECT node FROM pins ORDER BY node")
            return [nodes[id] for (id,) in rows if id in nodes]

    def _has(self, node: Node) -> bool:
        return bool(self.state.catalog.rows("SELECT 1 FROM pins WHERE node = ?", (node.id,)))
