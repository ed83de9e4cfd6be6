"""Bases: precached prompts whose path is pinned under a name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from towerd.errors import NotFound
from towerd.store.sessions.turn import Base
from towerd.store.state.loader import add_pins
from towerd.store.state.state import StoreState
from towerd.store.tree.module import module_from_json


@dataclass(slots=True)
class BaseTable:
    """The bases of an open store. The store's lock is held around every call."""

    state: StoreState
    version: int = 0
    """Counts changes."""

    def listing(self) -> list[Base]:
        """Every base by level, scope and name."""
        return [
            replace(Base(*row[:-1]), module=module_from_json(row[-1]))
            for row in self.state.catalog.rows(
                "SELECT name, scope, level, node, n_tokens, digest, format, module FROM bases"
                " WHERE tokenizer = ? ORDER BY level, scope, name",
                (self.state.identity.tokenizer,),
            )
        ]

    def find(self, name: str, scope: str) -> Base | None:
        """The base of this name and scope."""
        for base in self.listing():
            if (base.name, base.scope) == (name, scope):
                return base
        return None

    def add(self, base: Base, ids: bytes) -> Base:
        """Store and pin the path of a base; one that has its name and scope moves there. Returns
        it with its node."""
        old = self.find(base.name, base.scope)
        with self.state.growing() as growth:
            node = growth.grow(ids, base.scope, [base.n_tokens])[-1]
            base = replace(base, node=node.id)
            self._put(base, growth.now)
        add_pins(node, 1)
        if old is not None:
            add_pins(self.state.tree.nodes[old.node], -1)
        self.state.touch(node)
        return base

    def _put(self, base: Base, now: float) -> None:
        self.version += 1
        self.state.catalog.run(
            "INSERT INTO bases(tokenizer, scope, name, level, node, n_tokens, digest, created,"
            " format, module) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (tokenizer, scope, name) DO UPDATE SET"
            " level = excluded.level, node = excluded.node, n_tokens = excluded.n_tokens,"
            " digest = excluded.digest, created = excluded.created, format = excluded.format,"
            " module = excluded.module",
            (
                self.state.identity.tokenizer,
                base.scope,
                base.name,
                base.level,
                base.node,
                base.n_tokens,
                base.digest,
                now,
                base.format,
                base.module and base.module.to_json(),
            ),
        )

    def remove(self, name: str, scope: str) -> None:
        """Forget a base and its pin. Raises NotFound."""
        self.version += 1
        base = self.find(name, scope)
        if base is None:
            raise NotFound(f"there is no base {name!r} in scope {scope!r}")
        with self.state.catalog.transaction():
            self.state.catalog.run(
                "DELETE FROM bases WHERE tokenizer = ? AND scope = ? AND name = ?",
                (self.state.identity.tokenizer, scope, name),
            )
        add_pins(self.state.tree.nodes[base.node], -1)
