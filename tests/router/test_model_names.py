"""The models of a directory and of towerd.toml: their names, files and settings."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from towerd.errors import ConfigError
from towerd.router.loading.entry import ModelEntry, find_entries
from towerd.router.loading.launcher import Launcher, trace_of
from towerd.settings.sources import load_models
from towerd.store.catalog.shared.broker import CatalogBroker


def entries(folder: Path, toml: str = "") -> dict[str, ModelEntry]:
    file = folder.parent / "towerd.toml"
    file.write_text(toml)
    return find_entries(load_models({"models_dir": str(folder)}, {}, file))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory as in llama-server's documentation, with files that belong to none."""
    root = tmp_path / "models"
    for name in (
        "llama-3.2-1b-Q4_K_M.gguf",
        "mmproj-F16.gguf",
        "notes.txt",
        "gemma/gemma-3-4b-it-Q8_0.gguf",
        "gemma/mmproj-F16.gguf",
        "kimi/Kimi-00001-of-00002.gguf",
        "kimi/Kimi-00002-of-00002.gguf",
        "kimi/mtp-Kimi.gguf",
        "empty/readme.md",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_a_directory(folder: Path) -> None:
    found = entries(folder)
    assert list(found) == ["gemma", "kimi", "llama-3.2-1b-Q4_K_M"]
    assert found["gemma"].path == folder / "gemma" / "gemma-3-4b-it-Q8_0.gguf"
    assert found["gemma"].projector == folder / "gemma" / "mmproj-F16.gguf"
    assert found["kimi"].path == folder / "kimi" / "Kimi-00001-of-00002.gguf"
    assert found["kimi"].draft == folder / "kimi" / "mtp-Kimi.gguf"
    sizes = [len(f"kimi/{each.name}") for each in (folder / "kimi").iterdir()]
    assert found["kimi"].file_bytes() == sum(sizes)


def test_tables(folder: Path) -> None:
    found = entries(
        folder,
        f"""
[models."*"]
ctx_size = 512
[models.gemma]
alias = "g, small"
[models.mine]
model = "{folder}/kimi/mtp-Kimi.gguf"
""",
    )
    assert found["gemma"].aliases == ("g", "small")
    assert (found["gemma"].source, found["kimi"].source) == ("preset", "models_dir")
    assert found["mine"].path == folder / "kimi" / "mtp-Kimi.gguf"


def test_names_of_one_file(folder: Path) -> None:
    """With the same settings they are one model; with others the router knows that the file is one."""
    (folder / "link.gguf").symlink_to(folder / "gemma" / "gemma-3-4b-it-Q8_0.gguf")
    llama = folder / "llama-3.2-1b-Q4_K_M.gguf"
    found = entries(
        folder,
        f"""
[models.tiny]
model = "{llama}"
alias = "t"
[models.long]
model = "{folder}/../models/{llama.name}"
ctx_size = 4096
""",
    )
    assert list(found) == ["gemma", "kimi", "link", "long", "tiny"]
    assert found["tiny"].aliases == ("llama-3.2-1b-Q4_K_M", "t")
    assert found["long"].file_id == found["tiny"].file_id != found["gemma"].file_id
    assert found["link"].file_id == found["gemma"].file_id  # which has a projector


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[models.x]\nalias = "gemma"\n', "Two models have the name gemma"),
        ("[models.x]\nctx_sise = 5\n", "did you mean ctx_size"),
        ("[models.x]\nidle = 5\n", "did you mean idle_s"),
        ("[models.x]\nsearch = false\n", "a setting of the daemon"),
        ("[models.x]\nport = 5\n", "a setting of the daemon"),
        ("[models.x]\nkeep = 5\n", "must be true or false"),
        ("models = 5\n", "must be tables"),
    ],
)
def test_wrong_tables(folder: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entries(folder, toml)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        entries(tmp_path / "none")


def test_a_folder_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is passed over with a warning."""
    (folder / "lost+found").mkdir()
    listed = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert list(entries(folder)) == ["gemma", "kimi", "llama-3.2-1b-Q4_K_M"]
    assert "lost+found, which cannot be read: Permission denied" in caplog.text


def test_which_setting_wins(tmp_path: Path) -> None:
    """A flag, then the model's table, then the table of all, then the file."""
    file = tmp_path / "towerd.toml"
    file.write_text(
        "ctx_size = 1\nparallel = 1\nqueue_max = 1\nbatch_size = 1\n"
        '[models."*"]\nparallel = 2\nqueue_max = 2\nidle_s = 9\n'
        "[models.x]\nqueue_max = 3\nbatch_size = 3\nkeep = true\n"
    )
    tables = load_models({"batch_size": "4"}, {}, file)
    found = tables.config_of("x", ())
    assert (found.ctx_size, found.parallel, found.queue_max, found.batch_size) == (1, 2, 3, 4)
    assert (tables.table("x").keep, tables.table("x").idle_s) == (True, 9.0)
    assert (tables.table("y").keep, tables.table("y").idle_s) == (False, 9.0)
    assert tables.config_of("y", ()).queue_max == 2
    file.write_text("[models.x]\nkeep = true\n")
    tables = load_models({"sleep_idle_seconds": "7"}, {}, file)
    assert [tables.table(name).idle_s for name in ("x", "y")] == [7.0, 7.0]


def test_a_named_model_is_served_alone(tmp_path: Path) -> None:
    file = tmp_path / "towerd.toml"
    file.write_text("[models.x]\n")
    assert load_models({}, {}, file).are_many
    assert not load_models({"model": "m.gguf"}, {}, file).are_many


def test_no_two_models_have_one_trace(tmp_path: Path) -> None:
    """Whatever their names have of what files cannot, and where A and a are one file."""
    long = "x" * 300
    names = ("a", "A", "a/b", "a%2Fb", "a b", "..", "é", "e\u0301", f"{long}1", f"{long}2")
    traces = [trace_of(tmp_path / "day.trace", name, names) for name in names]
    assert {each.parent for each in traces} == {tmp_path}
    assert len({each.name.casefold() for each in traces}) == len(names)
    for each in traces:
        each.touch()
    assert trace_of(Path("t/trace"), "qwen3-8b", ()) == Path("t/trace.qwen3-8b")
    assert trace_of(Path("trace.jsonl"), "Qwen3-8B.Q4_K", ()) == Path("trace.Qwen3-8B.Q4_K.jsonl")


async def test_a_model_that_left_when_it_was_about_to_load(tmp_path: Path) -> None:
    """It still has settings, and its share of what others had."""
    file = tmp_path / "m" / "x.gguf"
    file.parent.mkdir()
    file.touch()
    (tmp_path / "none.toml").touch()
    tables = load_models({"models_dir": str(file.parent)}, {}, tmp_path / "none.toml")
    broker = CatalogBroker(tmp_path / "store")
    launcher = Launcher(tables, tmp_path, broker)
    try:
        (model,) = launcher.models().values()
        file.unlink()
        assert launcher.models() == {}
        process = await launcher.process(model)
        assert process.chats_bytes == tables.config.hot_bytes
        await process.end()
    finally:
        await launcher.close()
        broker.close()
