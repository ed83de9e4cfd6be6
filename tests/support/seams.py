"""What a test puts into the places where production code makes or finds its parts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from towerd.policy import Policy, make_policy
from towerd.store.catalog import database


@contextmanager
def hot_policy(policy: Policy) -> Iterator[None]:
    """The next `Ranking` that is made ranks the hot tier, which it asks for first, by `policy`."""
    waiting = [policy]

    def made(name: str, predictor: Path | None = None) -> Policy:
        return waiting.pop() if waiting else make_policy(name, predictor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towerd.tiers.ranking.make_policy", made)
        yield


@contextmanager
def connections() -> Iterator[list[sqlite3.Connection]]:
    """The connections to catalogs that are opened inside, the last one last."""
    found: list[sqlite3.Connection] = []
    connect = database.connect

    def connected(path: Path) -> sqlite3.Connection:
        found.append(connect(path))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "connect", connected)
        yield found
