"""An open store in a fresh directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from encrypted_stores import KINDS
from store_tools import ROW_IDENTITY

from towerd.store import Store


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests of a module that says BOTH_KINDS are of plain stores and of encrypted ones."""
    if hasattr(metafunc.module, "BOTH_KINDS") and "root" in metafunc.fixturenames:
        metafunc.parametrize("root", KINDS, indirect=True)


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """param: how the store there is, "plain" (also without one) or "encrypted"."""
    path = tmp_path / "store"
    KINDS[getattr(request, "param", "plain")](path)
    return path


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store.open(root, ROW_IDENTITY) as opened:
        yield opened
