"""An open store in a fresh directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_tools import ROW_IDENTITY

from towerd.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store.open(root, ROW_IDENTITY) as opened:
        yield opened
