"""An index of attention keys (multi-level prioritized DCI): how it is built, and a new tree in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from towerd.kernels import dispatch
from towerd.kernels._native import DciKeys, DciTree
from towerd.kernels.arrays import Bytes, Floats, Lines


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
    """An empty tree over keys of `n_dims` numbers. Raises ValueError, also if TOWERD_KERNELS names
    instructions that this machine lacks."""
    config = config or DciConfig()
    options = (config.ratio, config.page_rows, config.seed, config.visits_max, config.beam)
    return DciTree(n_dims, directions(n_dims, config), *options, dispatch.instructions())


def keys_at(
    planes: Sequence[Bytes], formats: Sequence[str], which: Lines, numbers: Lines, n_dims: int
) -> DciKeys:
    """The keys of a tree, read where they lie. Rows must not change while it is in use.

    planes: uint8[any, row_bytes] each, rows of `n_dims` numbers in its format, any distance apart
    which, numbers: int32[n], the plane that each key is in and its row there; a number below 0: it was
        removed. ValueError for rows of another size, and places that do not exist."""
    return DciKeys(planes, formats, which, numbers, n_dims)


def keys_in(rows: Floats) -> DciKeys:
    """The keys float32[n, n_dims] of a tree, in their order."""
    n, n_dims = rows.shape
    bytes_of_rows = np.ascontiguousarray(rows, np.float32).view(np.uint8)
    which, numbers = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    return DciKeys([bytes_of_rows], ["f32"], which, numbers, n_dims)


def directions(n_dims: int, config: DciConfig) -> Floats:
    """float32[n_directions, n_dims + 1]: the random directions of length 1 of a tree."""
    chance = np.random.default_rng(config.seed)
    rows = chance.standard_normal((config.n_directions, n_dims + 1))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)
