"""What a test puts into the places where production code makes or finds its parts."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from towerd.policy import Policy, Tree, make_policy
from towerd.store.catalog.database import CatalogFile


@contextmanager
def hot_policy(make: Callable[[Tree], Policy]) -> Iterator[list[Any]]:
    """The next `Ranking` that is made ranks the hot tier, for which it asks first, by the policy
    that `make` makes; it is in the list then."""
    made: list[Any] = []

    def policy(name: str, tree: Tree, predictor: Path | None = None) -> Policy:
        made.append(make_policy(name, tree, predictor) if made else make(tree))
        new: Policy = made[-1]
        return new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towerd.tiers.ranking.make_policy", policy)
        yield made


@contextmanager
def connections() -> Iterator[list[sqlite3.Connection]]:
    """The connections to catalogs that are opened inside, the last one last."""
    found: list[sqlite3.Connection] = []
    connect = CatalogFile.connect

    def connected(file: CatalogFile) -> sqlite3.Connection:
        found.append(connect(file))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CatalogFile, "connect", connected)
        yield found
