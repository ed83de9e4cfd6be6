"""An index of attention keys: the C++ tree if it is built, else the numpy reference (slow)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from towerd.kernels import dispatch
from towerd.kernels.reference import dci as reference_dci
from towerd.kernels.reference.dci import F32, I32, I64, U8

__all__ = ["DciConfig", "DciTree", "make_dci_tree"]


class DciTree(Protocol):
    """The interface of both implementations; see `reference.dci.ReferenceDciTree`."""

    @property
    def n_levels(self) -> int: ...
    @property
    def n_pages(self) -> int: ...
    def __len__(self) -> int: ...
    def add(self, keys: F32) -> None: ...
    def search(self, queries: F32, k: int, visits_max: int, beam: int) -> I64: ...
    def vote(
        self, queries: F32, k: int, visits_max: int, beam: int, others: F32, there: U8
    ) -> tuple[I64, F32]: ...
    def keys(self, numbers: I64) -> F32: ...
    def levels(self) -> I32: ...
    def parents(self) -> I64: ...
    def pages(self) -> I64: ...
    def copy(self) -> DciTree: ...
    def check_integrity(self) -> None: ...


@dataclass(frozen=True)
class DciConfig:
    """How a tree is built. Values are checked when a tree is made."""

    page_rows: int = 16
    """Maximum number of keys on a page."""
    ratio: float = 1 / 16
    """Share of a level's keys that move up to the next level; nodes have about 1 / ratio keys."""
    n_directions: int = 4
    """Random directions that order the points of a node."""
    visits_max: int = 64
    """Points of a node that the search for a parent looks at; 0: all."""
    beam: int = 4
    """Nodes of a level that the search for a parent enters; 0: all."""
    seed: int = 1


def make_dci_tree(n_dims: int, config: DciConfig | None = None) -> DciTree:
    """An empty tree over keys of `n_dims` numbers. Raises ValueError.

    TOWERD_KERNELS=reference forces the numpy tree; both give the same tree. Also raises
    ValueError if it names instructions that this machine lacks."""
    config = config or DciConfig()
    chance = np.random.default_rng(config.seed)
    directions = chance.standard_normal((config.n_directions, n_dims + 1))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    rows = directions.astype(np.float32)
    options = (config.ratio, config.page_rows, config.seed, config.visits_max, config.beam)
    name = dispatch.name()
    if name != "reference":
        from towerd.kernels import _native

        isa = None if name == "metal" else name
        return _native.DciTree(n_dims, rows, *options, isa)
    return reference_dci.ReferenceDciTree(n_dims, rows, *options)
