"""What the tests of training share; without torch there is nothing to test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_world import MANIFEST, write_world

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("tokenizers") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for a second thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def manifest_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists the sources of the small world."""
    path = tmp_path_factory.mktemp("manifest") / "manifest.toml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of the small world."""
    folder = tmp_path_factory.mktemp("data")
    write_world(folder)
    return folder
