"""Node: one segment of the cache trie, a run of tokens under its parent chain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.slots.runs import Runs

if TYPE_CHECKING:
    from towerd.store.segment_file import SegmentFile

Ids: TypeAlias = npt.NDArray[np.int32]

PUBLIC = "public"
"""The scope whose segments every tenant may reuse."""
ID_BYTES = 4


def ids_bytes(ids: Ids) -> bytes:
    """Token ids as little-endian int32. ValueError unless they are integers in one dimension."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("token ids must be integers in one dimension")
    return array.astype("<i4", copy=False).tobytes()


def ids_array(data: bytes) -> Ids:
    """The inverse of `ids_bytes`; a read-only view of `data`."""
    return np.frombuffer(data, np.int32)


def path_bytes(ids: Ids, ends: Sequence[int]) -> bytes:
    """The ids up to the last end, as bytes. ValueError unless the ends ascend within them."""
    bounds = [0, *ends, len(ids) + 1]
    if not ends or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"ends {list(ends)} must ascend strictly from 1 to {len(ids)}")
    return ids_bytes(ids)[: ends[-1] * ID_BYTES]


class Node:
    """A run of tokens [p0, p1) below `parent`; only the store changes it, under its lock.

    Rows cover the whole node or nothing: `hot` holds them in memory, `file` on disk, where
    they begin at row `file_row0`. `derived`: approximate rows went into computing the hot ones.
    A split keeps this object for the lower part."""

    __slots__ = (
        "by_token", "derived", "file", "file_row0", "hits", "hot", "id", "ids", "last_used", "p0",
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
        self.derived = False
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

    @property
    def file_rows(self) -> int:
        """Rows of `file` that belong to this node: all of the node's, or 0 without a file."""
        return self.n if self.file is not None else 0

    @property
    def has_exact_hot(self) -> bool:
        """True when the rows in memory are what prefill computes."""
        return self.hot is not None and not self.derived and self.hot.is_native

    @property
    def has_exact_file(self) -> bool:
        """True when the rows on disk are what prefill computes."""
        return self.file is not None and self.file.is_exact(self.p0, self.p1)

    @property
    def pinned(self) -> bool:
        """True when a pin or a base needs this node: it, or one below it, is pinned."""
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
