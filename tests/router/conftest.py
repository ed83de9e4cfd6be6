"""Routers of several models, as real daemons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon
from routed import MakeRouter

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.models.bundled import bundled_model


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tales` and `dice`, which answer, and `junk`, which is no GGUF."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tales.gguf").write_bytes(bundled_model().read_bytes())
    make_random_gguf(folder / "dice.gguf", PRESETS["tiny"])
    (folder / "junk.gguf").write_text("no model at all\n" * 100)
    return folder


@pytest.fixture
def make_router(tmp_path: Path, models_dir: Path) -> Iterator[MakeRouter]:
    """`make_router(*flags, toml="")`: a router of this test's own, started; killed at the end."""
    made: list[Daemon] = []

    def make(*flags: str, toml: str = "", name: str = "r", folder: Path = models_dir) -> Daemon:
        file = tmp_path / f"{name}.toml"
        file.write_text(toml)
        given = ("--models-dir", str(folder), "-c", "2048", "--config", str(file), *flags)
        made.append(Daemon(tmp_path / name, *given))
        return made[-1].start()

    yield make
    for each in made:
        if each.process is not None:
            each.kill()
