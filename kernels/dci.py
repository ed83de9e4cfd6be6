"""An index of attention keys (multi-level prioritized DCI): how it is built, and a new tree in C++."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from towerd.kernels import dispatch
from towerd.kernels._native import DciTree
from towerd.kernels.arrays import Floats


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


def directions(n_dims: int, config: DciConfig) -> Floats:
    """float32[n_directions, n_dims + 1]: the random directions of length 1 of a tree."""
    chance = np.random.default_rng(config.seed)
    rows = chance.standard_normal((config.n_directions, n_dims + 1))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)
