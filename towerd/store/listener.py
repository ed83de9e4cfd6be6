"""Listener: who hears of every change of segments and their rows, in the order of the changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from towerd.store.node import Node
    from towerd.store.segment_file import SegmentFile


class Listener:
    """Each method is called under the store's lock, in the same holding of it as the change, once
    the change is durable. A change that is rolled back is never told. A method must be quick, must
    not change the store, and must not wait for anyone who may wait for the store. This one does
    nothing."""

    def split(self, lower: Node, upper: Node) -> None:
        """`lower` was cut; `upper` is its beginning and its parent."""

    def removed(self, node: Node) -> None:
        """A segment left the trie, and its rows in memory with it."""

    def became_hot(self, nodes: Sequence[Node]) -> None:
        """Segments have rows in memory now, or others than before."""

    def left_hot(self, node: Node) -> None:
        """The store let go of a segment's rows in memory."""

    def became_warm(self, file: SegmentFile) -> None:
        """A file was written; its nodes view it."""

    def left_warm(self, file: SegmentFile) -> None:
        """A file is gone, and no node views it. If another one took its place, that is its
        `successor`, of which `became_warm` tells next."""
