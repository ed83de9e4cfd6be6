"""IceCache: of everything the chat ever held, what the present queries look for (Mao et al. 2026,
"IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs", sections 4.1, 4.2, A, B).

    [ sink ][ indexed: the pages that the queries' nearest keys lie in ][ window ]

Each KV head of each layer has a DCI tree over its keys; tokens enter it when they leave the window.
The queries of a group search the tree of their KV head, and the pages they hit are shared.

The trees refer to the keys of the offloaded rows, wherever these lie and in their format, and hold none
but one in sixteen, which show the way to the others.

The paper loads pages per head. Here a group chooses: one KV head, the heads of a layer, or all heads.
Each of its heads votes for every key of its pages. The vote is the attention that the key would get if
there were only these pages, the sink and the window, from the query that gives it the most. A head that
looks for one token outvotes many that spread their attention. A layer without trees takes the choice of
the nearest layer that has some.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from towerd.kernels._native import DciTree
from towerd.kernels.dci import DciConfig, make_dci_tree
from towerd.retention.base import (
    SINK_DEFAULT,
    Indices,
    Keys,
    Positions,
    Recalling,
    RetentionConfig,
    Rows,
    Signal,
    View,
    top,
)

Votes = npt.NDArray[np.float32]
T = TypeVar("T")

_KEYS_MIN = 8
_FORGOTTEN_SHARE_MAX = 0.5
"""Forgotten positions for each indexed one; beyond this, the trees are built anew."""


@dataclass(frozen=True, slots=True)
class IceCacheConfig(RetentionConfig):
    """Sizes are in tokens."""

    keys_max: int = 64
    """Nearest keys that each query looks for; the pages they lie in are voted on."""
    layer_first: int = 2
    """Layers before this one have no trees: their attention is not sparse (section 5.1)."""
    layer_step: int = 1
    """3: only every third layer has trees and votes (the reuse form, section C)."""
    followers: int = 0
    """Positions after a voted one that get a share of its votes, each less than the one before: a
    choice for several tokens at once must cover what the later ones will look for."""
    n_threads: int = 1
    """Threads that search. Trees are independent, so the result is the same with any number."""
    tree: DciConfig = field(default_factory=DciConfig)

    def __post_init__(self) -> None:
        RetentionConfig.__post_init__(self)
        if self.keys_max < 1 or self.layer_first < 0 or self.layer_step < 1:
            raise ValueError("IceCache looks for at least one key, in layers that exist")
        if self.followers < 0:
            raise ValueError("IceCache cannot bring fewer than no followers")
        if self.n_threads < 1:
            raise ValueError("IceCache needs a thread")

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        window = (budget - SINK_DEFAULT) // 4
        free = budget - SINK_DEFAULT - window
        return cls(window=window, keys_max=max(_KEYS_MIN, free // 2))

    def anchors(self, n_layer: int) -> range:
        """The layers that have trees: the last layer alone if the model is too small."""
        return range(min(self.layer_first, n_layer - 1), n_layer, self.layer_step)


class IceCache(Recalling):
    """Keeps the sink, the window, and the indexed positions with the most votes."""

    signals = frozenset((Signal.KEYS, Signal.QUERIES))

    config: IceCacheConfig

    def __init__(self, config: IceCacheConfig) -> None:
        super().__init__(config)
        self._trees: dict[tuple[int, int], DciTree] = {}
        self._indexed: Positions = np.empty(0, np.int64)
        """The position of each key number, which is the same in every tree; -1: forgotten."""
        self._n_bytes = 0
        """Counted after each change: other threads may ask, but not the trees, which grow without the GIL."""

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def index_bytes(self, layers: int, kv_heads: int, head_size: int) -> int:
        return len(self.config.anchors(layers)) * kv_heads * _tree_bytes(head_size)

    def _check(self, view: View, n_max: int) -> None:
        super()._check(view, n_max)
        check_rows(view.keys, view.queries)

    def _choose_groups(self, view: View, span: slice, room: int, shape: tuple[int, int]) -> Indices:
        """The keys of a position must be the same at every call."""
        assert view.keys is not None
        n_layer, n_heads = view.keys.shape[:2]
        if shape[0] not in (1, n_layer) or shape[1] not in (1, n_heads):
            raise ValueError(
                f"groups of shape {shape} for keys of {n_layer} layers, {n_heads} heads"
            )
        numbers = np.arange(span.start, span.stop)
        at = self._insert(view.positions, view.keys, numbers, self.config.n_threads)
        votes = self._votes(view, span, shape, at)
        followers, positions = self.config.followers, view.positions[span]
        chosen = np.stack(
            [
                [top(passed_on(of_group, positions, followers), room) for of_group in of_layer]
                for of_layer in votes
            ]
        )
        return chosen if shape[0] == 1 else chosen[self._nearest_anchors(n_layer)]

    def _nearest_anchors(self, n_layer: int) -> Indices:
        """int64[n_layer]: which of the layers with trees is nearest to each layer; the one before if two
        are as near."""
        anchors = np.array(self.config.anchors(n_layer))
        distances = np.abs(anchors - np.arange(n_layer)[:, None])
        nearest: Indices = np.argmin(distances, axis=1)
        return nearest

    def layers(self, n_layer: int) -> range:
        return self.config.anchors(n_layer)

    def index(self, positions: Positions, keys: Keys, *, n_threads: int = 1) -> None:
        self._insert(positions, keys, np.arange(len(positions)), n_threads)

    def forget(self, positions: Positions) -> None:
        gone = np.isin(self._indexed, positions)
        if not gone.any():
            return
        for tree in self._trees.values():
            tree.remove(gone.view(np.uint8))
        self._indexed = np.where(gone, -1, self._indexed)
        self._count()

    def _count(self) -> None:
        trees = sum(tree.nbytes for tree in self._trees.values())
        self._n_bytes = trees + self._indexed.nbytes

    def truncate(self, n: int) -> None:
        self.forget(self._indexed[self._indexed >= n])

    def fork(self) -> Self:
        branch = type(self)(self.config)
        branch._trees = {place: tree.copy() for place, tree in self._trees.items()}
        branch._indexed, branch._n_bytes = self._indexed, self._n_bytes
        return branch

    def _insert(
        self, positions: Positions, keys: Keys, wanted: Positions, n_threads: int
    ) -> Positions:
        """Index those of `positions` that are at the indices `wanted`, and forget what is not among
        `positions`. Returns the index in `positions` of each key number; -1: forgotten."""
        self.forget(np.setdiff1d(self._indexed[self._indexed >= 0], positions, assume_unique=True))
        if (self._indexed < 0).sum() > _FORGOTTEN_SHARE_MAX * (self._indexed >= 0).sum():
            self._trees, self._indexed = {}, np.empty(0, np.int64)  # built anew
        new = positions[wanted]
        new = new[~np.isin(new, self._indexed)]
        indexed = np.concatenate([self._indexed, new])
        at = np.where(indexed < 0, -1, np.searchsorted(positions, indexed))
        if not len(new):
            return at
        layers, kv_heads, _, size = keys.shape
        if not self._trees:
            every = itertools.product(self.config.anchors(layers), range(kv_heads))
            self._trees = {place: make_dci_tree(size, self.config.tree) for place in every}

        def add(place: tuple[int, int]) -> None:
            self._trees[place].add(keys.at(*place, at))

        try:
            self._of_each(add, n_threads)
        except BaseException:  # no tree may have keys that the others lack
            self._trees, self._indexed, self._n_bytes = {}, np.empty(0, np.int64), 0
            raise
        self._indexed = indexed
        self._count()
        return at

    def _votes(self, view: View, span: slice, shape: tuple[int, int], indices: Positions) -> Votes:
        """float32[layers with trees, KV heads, length of span]: the votes of each group; 1 where `shape`
        is. indices: that of each key number in the view; -1: forgotten"""
        keys, queries = view.keys, view.queries
        assert keys is not None
        assert queries is not None
        anchors = self.config.anchors(keys.shape[0])
        n_groups = (len(anchors) if shape[0] > 1 else 1, shape[1])
        votes = np.zeros((*n_groups, span.stop - span.start), np.float32)
        if not queries.shape[2]:
            return votes
        there = ((indices >= span.start) & (indices < span.stop)).astype(np.uint8)
        ends = np.concatenate([np.arange(span.start), np.arange(span.stop, view.n)])
        group, k = queries.shape[1] // keys.shape[1], self.config.keys_max

        def ask(at: tuple[int, int]) -> tuple[Positions, Votes]:
            asking = queries[at[0], at[1] * group : (at[1] + 1) * group]
            asking = np.ascontiguousarray(asking.reshape(-1, asking.shape[-1]))
            beam = max(self.config.tree.beam, k)
            indexed, others = keys.at(*at, indices), keys.read(*at, ends)
            return self._trees[at].vote(indexed, asking, k, 0, beam, others, there)

        answers = zip(self._trees, self._of_each(ask, self.config.n_threads), strict=True)
        for (layer, head), (numbers, shares) in answers:
            of_group = votes[anchors.index(layer) % n_groups[0], head % n_groups[1]]
            of_group[indices[numbers] - span.start] += shares
        return votes

    def _of_each(self, work: Callable[[tuple[int, int]], T], n_threads: int) -> list[T]:
        """The results of `work` for each tree, in their order."""
        if n_threads == 1:
            return list(map(work, self._trees))
        with ThreadPoolExecutor(n_threads, "towerd-trees") as threads:
            return list(threads.map(work, self._trees))


def passed_on(votes: Votes, positions: Positions, followers: int) -> Votes:
    """float32[n]: for each position the largest of its own votes and the shares from those before
    it. The one d positions before gives 1 - d / (followers + 1) of its votes, d <= `followers`."""
    most = votes.copy()
    for d in range(1, min(followers, len(votes) - 1) + 1):
        share = votes[:-d] * np.float32(1 - d / (followers + 1))
        is_near = positions[d:] - positions[:-d] == d
        np.maximum(most[d:], np.where(is_near, share, 0), out=most[d:])
    return most


def _tree_bytes(head_size: int) -> int:
    """Approximate size of a key in a tree: its links, and a share of the keys that others hang below
    (kernels/cpp/dci_points.h)."""
    return 48 + head_size * 5 // 16


def check_rows(keys: Keys | None, queries: Rows | None) -> None:
    """Raises ValueError unless keys and queries agree in layers, heads and head size."""
    if keys is None or queries is None or len(keys.shape) != 4 or queries.ndim != 4:
        raise ValueError("keys and queries must be [layers, heads, rows, head size]")
    (layers, heads, _, size), (q_layers, q_heads, _, q_size) = keys.shape, queries.shape
    if (layers, size) != (q_layers, q_size) or heads < 1 or q_heads % heads:
        raise ValueError(f"queries of shape {queries.shape} do not go with keys of {keys.shape}")
