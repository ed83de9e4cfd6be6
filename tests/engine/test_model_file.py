"""The hash of a model's file: when it is taken from memory, and when it is taken again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from split_gguf import split
from waiting import until

from towerd.errors import ModelError
from towerd.model import model_file
from towerd.model.llama_model import LlamaModel
from towerd.model.model_file import FileState, ModelFile, weights_hash
from towerd.model.weights_check import WeightsCheck
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config
from towerd.store import Catalog
from towerd.store.catalog.sqlite import SqliteCatalog

SIZE = 3 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    made = SqliteCatalog(tmp_path / "catalog.sqlite")
    yield made
    made.close()


@pytest.fixture
def no_ctime(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that keeps the times that programs set, and no other."""

    def of(stat: os.stat_result) -> FileState:
        return FileState(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, 0)

    monkeypatch.setattr(FileState, "of", of)


def change(path: Path, at: int, n: int = 1) -> None:
    """Other bytes there; the modification time as before."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(n)
        file.seek(at)
        file.write(bytes(byte ^ 1 for byte in old))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def identify(path: Path, catalog: Catalog) -> str:
    with ModelFile(path) as file:
        return file.identify(catalog)


def test_a_file_that_looks_the_same_is_not_read(
    path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = identify(path, catalog)

    def fail(*_: object) -> str:
        raise AssertionError("it was read")

    monkeypatch.setattr(ModelFile, "hash", fail)
    assert identify(path, catalog) == known


def test_any_change_counts_where_the_file_system_has_a_ctime(path: Path, catalog: Catalog) -> None:
    known = identify(path, catalog)
    for at in (0, SIZE // 3, SIZE - 1):
        change(path, at)
        assert identify(path, catalog) != known
        change(path, at)
        assert identify(path, catalog) == known


@pytest.mark.usefixtures("no_ctime")
def test_samples_find_other_weights_without_a_ctime(path: Path, catalog: Catalog) -> None:
    """The first page, the last one, and any longer run in between."""
    known = identify(path, catalog)
    for at, n in ((5, 1), (SIZE - 1, 1), (SIZE // 2, 1 << 16)):
        change(path, at, n)
        assert identify(path, catalog) != known
        change(path, at, n)
        assert identify(path, catalog) == known


def test_a_file_that_is_still_being_written_is_refused(path: Path, catalog: Catalog) -> None:
    with ModelFile(path) as file:
        change(path, 9)
        with pytest.raises(ModelError, match="changed while it was loaded"):
            file.identify(catalog)


def unsampled(size: int) -> int:
    """A byte that no sample has."""
    sampled = set(model_file.sample_offsets(size))
    return next(at for at in range(0, size, model_file.PAGE_BYTES) if at not in sampled)


Checked = Callable[[ModelFile, list[float]], WeightsCheck]


@pytest.fixture
def checked(catalog: Catalog) -> Iterator[Checked]:
    """`checked(file, told)`: a check that looks all the time and reads the file at every look."""
    made: list[WeightsCheck] = []

    def check(file: ModelFile, told: list[float]) -> WeightsCheck:
        made.append(
            WeightsCheck(
                [file],
                catalog,
                is_busy=lambda: False,
                on_change=told.append,
                look_s=0.001,
                idle_s=0.0,
                every_s=0.0,
            )
        )
        return made[-1]

    yield check
    for each in made:
        each.close()


@pytest.mark.usefixtures("no_ctime")
def test_idle_time_finds_what_nothing_else_does(
    path: Path, catalog: Catalog, checked: Checked
) -> None:
    """One byte outside of all samples: the file is read while nothing runs; what is made since it
    was right is told, and the next start knows better."""
    known = identify(path, catalog)
    told: list[float] = []
    with ModelFile(path) as file:
        file.identify(catalog)
        check = checked(file, told)
        first = file.known.verified
        check.start()
        until(lambda: file.known.verified > first)
        assert not told
        change(path, unsampled(SIZE))
        assert identify(path, catalog) == known  # not even a start finds it
        until(lambda: bool(told))
        assert first < told[0] <= time.time()
        check.close()
    assert identify(path, catalog) != known


def test_a_file_that_was_touched_is_still_the_same(
    path: Path, catalog: Catalog, checked: Checked
) -> None:
    """Another mode, another name beside it: it is read once more, and believed."""
    told: list[float] = []
    with ModelFile(path) as file:
        file.identify(catalog)
        before = file.known.state
        check = checked(file, told)
        path.chmod(0o600)
        path.with_name("beside").hardlink_to(path)
        check.start()
        until(lambda: file.known.state != before)
        check.close()
    assert not told


def test_every_file_of_a_split_model_counts(tmp_path: Path, catalog: Catalog) -> None:
    """Weights that differ in the last file alone are other weights."""
    paths = split(bundled_model(), tmp_path / "m.gguf", tensors_max=20)

    def weights() -> str:
        model = LlamaModel(paths[0], Config())
        try:
            return weights_hash(model.files, catalog)
        finally:
            model.close()

    before = weights()
    assert weights() == before
    change(paths[-1], paths[-1].stat().st_size - 100)
    assert weights() != before
    paths[1].unlink()
    with pytest.raises(ModelError, match="m-00002-of-00003.gguf"):
        weights()
