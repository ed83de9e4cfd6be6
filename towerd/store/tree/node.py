"""Node: one segment of the prefix tree, a run of tokens below its parent chain."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from towerd.slots.runs import Runs
from towerd.store.segments.segment_file import SegmentFile
from towerd.tokens import ID_BYTES, Ids, Provenance, ids_array, provenance_as_kept

PUBLIC = "public"
"""The scope whose segments every tenant may reuse."""


class Node:
    """A run of tokens [p0, p1) below `parent`. Only the store changes it, under its lock.

    Rows cover the whole node or none of it: `hot` holds them in memory, `file` on disk,
    starting at row `file_row0`. `origin`: what the hot rows were computed as, see `origin_of`.
    After a split this object is the lower part."""

    __slots__ = (
        "by_token", "file", "file_row0", "hits", "hot", "id", "ids", "last_used", "origin", "p0",
        "p1", "parent", "pins", "removed", "scope",
    )  # fmt: skip

    def __init__(self, id: int, parent: Node | None, scope: str, p0: int, ids: bytes) -> None:
        self.id = id
        self.parent = parent
        self.scope = scope
        self.p0 = p0
        self.p1 = p0 + len(ids) // ID_BYTES
        self.ids = ids
        self.by_token: dict[tuple[str, int], Node] | None = None
        self.file: SegmentFile | None = None
        self.file_row0 = 0
        self.hot: Runs | None = None
        self.origin = Provenance.EXACT
        self.pins = 0
        self.hits = 0
        self.last_used = 0.0
        self.removed = False

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.scope!r}, [{self.p0}, {self.p1}))"

    @property
    def n(self) -> int:
        """Tokens in this run."""
        return self.p1 - self.p0

    @property
    def first(self) -> int:
        """The first token id of the run."""
        return int.from_bytes(self.ids[:ID_BYTES], "little", signed=True)

    @property
    def children(self) -> Collection[Node]:
        """The runs that continue this one, of any scope."""
        return self.by_token.values() if self.by_token else ()

    def newest(self, n: int) -> list[Node]:
        """The `n` children that came last, the newest first; there may be a hundred thousand."""
        return list(islice(reversed(self.by_token.values()), n)) if self.by_token else []

    @property
    def has_rows(self) -> bool:
        """True if it has rows, in memory or on disk."""
        return self.hot is not None or self.file is not None

    @property
    def worst_hot(self) -> Provenance | None:
        """The worst provenance of the rows in memory; None if there are none."""
        if self.hot is None:
            return None
        return provenance_as_kept(self.origin, is_native=self.hot.is_native)

    @property
    def worst_file(self) -> Provenance | None:
        """The worst provenance of the rows on disk; None if there are none."""
        return None if self.file is None else self.file.worst(self.p0, self.p1)

    @property
    def pinned(self) -> bool:
        """True if this node or a descendant is pinned or is a base's node."""
        return self.pins > 0

    def path(self) -> list[Node]:
        """The nodes from the first below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix_bytes(self) -> bytes:
        """The ids [0, p1) as little-endian int32."""
        return b"".join([node.ids for node in self.path()])

    def prefix_ids(self) -> Ids:
        """The ids [0, p1), int32[p1]."""
        return ids_array(self.prefix_bytes())
