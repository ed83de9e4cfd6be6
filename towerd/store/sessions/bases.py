"""Bases: precached prompts whose path is pinned under a name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from towerd.errors import NotFound
from towerd.store.catalog.catalog import Catalog
from towerd.store.prefix.module import module_from_json
from towerd.store.sessions.turn import Base


@dataclass(slots=True)
class BaseTable:
    """The bases of one fingerprint. The store's lock is held around every call."""

    catalog: Catalog
    fingerprint: int
    version: int = 0
    """Counts changes."""

    def listing(self) -> list[Base]:
        """Every base by level, scope and name."""
        return [
            replace(Base(*row[:-1]), module=module_from_json(row[-1]))
            for row in self.catalog.rows(
                "SELECT name, scope, level, node, n_tokens, digest, format, module FROM bases"
                " WHERE fingerprint = ? ORDER BY level, scope, name",
                (self.fingerprint,),
            )
        ]

    def find(self, name: str, scope: str) -> Base | None:
        """The base of this name and scope."""
        for base in self.listing():
            if (base.name, base.scope) == (name, scope):
                return base
        return None

    def put(self, base: Base, now: float) -> None:
        """Enter or move a base, inside a transaction."""
        self.version += 1
        self.catalog.run(
            "INSERT INTO bases(fingerprint, scope, name, level, node, n_tokens, digest, created,"
            " format, module) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (fingerprint, scope, name) DO UPDATE SET"
            " level = excluded.level, node = excluded.node, n_tokens = excluded.n_tokens,"
            " digest = excluded.digest, created = excluded.created, format = excluded.format,"
            " module = excluded.module",
            (
                self.fingerprint,
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

    def remove(self, name: str, scope: str) -> int:
        """Forget a base; returns the id of its node. Raises NotFound."""
        self.version += 1
        base = self.find(name, scope)
        if base is None:
            raise NotFound(f"there is no base {name!r} in scope {scope!r}")
        with self.catalog.transaction():
            self.catalog.run(
                "DELETE FROM bases WHERE fingerprint = ? AND scope = ? AND name = ?",
                (self.fingerprint, scope, name),
            )
        return base.node
