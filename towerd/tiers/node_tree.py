"""NodeTree: the store's prefix tree as eviction policies read it."""

from __future__ import annotations

from collections.abc import Iterable

from towerd.policy import Key
from towerd.store import Node, SegmentFile
from towerd.store.tree.tree import PrefixTree


class NodeTree:
    """A `policy.Tree` whose keys are node ids. It is read without the store's lock, by whoever
    holds the ranking's: a single look at a node never meets half a change."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.removed: dict[Key, Node] = {}
        """Nodes that are gone, but not for the policies, which have still to hear of it."""

    def parent(self, key: Key) -> Key | None:
        """See Tree.parent."""
        node = self._tree.nodes.get(key) or self.removed.get(key)
        above = None if node is None else node.parent
        return None if above is None or above.parent is None else above.id

    def children(self, key: Key) -> Iterable[Key]:
        """See Tree.children."""
        node = self._tree.nodes.get(key)
        below = () if node is None else tuple(node.children)
        return (child.id for child in reversed(below))

    def file(self, key: Key) -> SegmentFile | None:
        """The file that has the node's rows."""
        node = self._tree.nodes.get(key)
        return None if node is None else node.file
