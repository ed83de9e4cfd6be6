"""Pins: nodes that the operator keeps from eviction and gc, each with its whole path."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.errors import NotFound
from towerd.store.state.loader import add_pins
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node


@dataclass(frozen=True, slots=True)
class PinTable:
    """The pins of an open store. The store's lock is held around every call."""

    state: StoreState

    def add(self, node: Node) -> None:
        """Keep a node and its path. Pinning twice is pinning once."""
        if not self._has(node):
            with self.state.catalog.transaction():
                self.state.catalog.run(
                    "INSERT INTO pins(node, created) VALUES (?, ?)", (node.id, self.state.clock())
                )
            add_pins(node, 1)

    def remove(self, node: Node) -> None:
        """Undo `add`. Raises NotFound if the node is not pinned."""
        if not self._has(node):
            raise NotFound(f"segment {node.id} is not pinned")
        with self.state.catalog.transaction():
            self.state.catalog.run("DELETE FROM pins WHERE node = ?", (node.id,))
        add_pins(node, -1)

    def listing(self) -> list[Node]:
        """The nodes that `add` was called for."""
        nodes = self.state.tree.nodes
        rows = self.state.catalog.rows("SELECT node FROM pins ORDER BY node")
        return [nodes[id] for (id,) in rows if id in nodes]

    def _has(self, node: Node) -> bool:
        return bool(self.state.catalog.rows("SELECT 1 FROM pins WHERE node = ?", (node.id,)))
