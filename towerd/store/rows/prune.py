"""Segments that only one session needs. They can be removed once its tokens are coded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from towerd.store.segments.segment_file import SegmentFile
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.store.tree.tree import PrefixTree

BASE_TOKENS_MIN = 32
"""A shorter prefix is coded with the rest: a reference to it would take as many bytes."""

_OTHERS = (
    "SELECT 1 FROM turns WHERE prompt_node = ?1 AND session != ?2"
    " UNION ALL SELECT 1 FROM turns WHERE reply_node = ?1 AND session != ?2"
    " UNION ALL SELECT 1 FROM cold WHERE base = ?1 AND session != ?2 LIMIT 1"
)


@dataclass(slots=True)
class OtherUsers:
    """Finds out what needs a segment besides one session. The store's lock is held around
    every call."""

    state: StoreState
    session: int

    def is_end(self, node: Node) -> bool:
        """Whether a turn of another session ends at `node`, or its blob continues from it."""
        return bool(self.state.catalog.rows(_OTHERS, (node.id, self.session)))

    def holds(self, node: Node) -> bool:
        """Whether anything else needs `node`: a pin, a base, or another session here or below."""
        stack = [node]
        while stack:
            each = stack.pop()
            if each.pinned or self.is_end(each):
                return True
            stack += each.children
        return False

    def shares(self, node: Node, own: Collection[int]) -> bool:
        """Whether a segment of the session, whose nodes are `own`, is shared with another user."""
        if node.pinned or self.is_end(node):
            return True
        return any(child.id not in own and self.holds(child) for child in node.children)


def common_base(needs: OtherUsers, leaf: Node, own: Collection[int]) -> Node | None:
    """The deepest segment on the path of `leaf` that others need too; None if its prefix is too
    short."""
    for node in reversed(leaf.path()):
        if node.p1 < BASE_TOKENS_MIN:
            break
        if needs.shares(node, own):
            return node
    return None


def own_nodes(state: StoreState, session: int) -> list[Node]:
    """Every segment on the paths of a session's turns, children before their parents."""
    found: dict[int, Node] = {}
    for prompt_node, reply_node in state.catalog.rows(
        "SELECT prompt_node, reply_node FROM turns WHERE session = ?", (session,)
    ):
        for id in (prompt_node, reply_node):
            node = state.tree.nodes.get(id)
            while node is not None and node.parent is not None and node.id not in found:
                found[node.id] = node
                node = node.parent
    return sorted(found.values(), key=lambda node: -node.p1)


def unneeded(needs: OtherUsers, own: Sequence[Node], base: Node | None) -> list[Node]:
    """The session's own segments and their descendants that nothing else needs, children
    before their parents. `base` stays, because the session's blob needs it."""
    kept = set() if base is None else {node.id for node in base.path()}
    mine = {node.id for node in own}
    doomed: dict[int, Node] = {}
    for node in own:
        if node.id in kept or node.pinned or needs.is_end(node):
            continue
        others = [child for child in node.children if child.id not in doomed]
        if any(child.id in mine or needs.holds(child) for child in others):
            continue
        for child in others:
            doomed |= {each.id: each for each in _subtree(child)}
        doomed[node.id] = node
    return list(doomed.values())


def unviewed(tree: PrefixTree, doomed: Sequence[Node]) -> list[SegmentFile]:
    """Files that only these segments view."""
    ids = {node.id for node in doomed}
    files = {node.file.id: node.file for node in doomed if node.file is not None}
    return [f for f in files.values() if all(node.id in ids for node in tree.viewers(f))]


def _subtree(node: Node) -> list[Node]:
    """A node and all its descendants, children before their parents."""
    found = [node]
    for each in found:
        found += each.children
    return found[::-1]
