"""Listener: receives every change of segments and their rows, in order."""

from __future__ import annotations

from collections.abc import Sequence

from towerd.store.segments.segment_file import SegmentFile
from towerd.store.tree.node import Node


class Listener:
    """Each method is called under the store's lock, in the same critical section as the
    change, once the change is durable. Changes that are rolled back are not reported. A
    method must be quick, must not change the store, and must not wait for a thread that may
    wait for the store. This implementation does nothing."""

    def split(self, lower: Node, upper: Node) -> None:
        """`lower` was split; `upper` holds its beginning and is its new parent."""

    def removed(self, node: Node) -> None:
        """A segment was removed from the prefix tree, together with its rows in memory."""

    def became_hot(self, nodes: Sequence[Node]) -> None:
        """Segments have new rows in memory."""

    def left_hot(self, node: Node) -> None:
        """A segment's rows in memory were released."""

    def became_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        """A file was written with the rows of `nodes`."""

    def left_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        """A file was removed, and with it the rows of `nodes` on disk. If another file replaced
        it, that is its `successor`, which the next `became_warm` reports."""
