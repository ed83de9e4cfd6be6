"""`-m NAME` and `-hf`: which files a daemon is started with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import HubServer, hub_server

from towerd.cli.models.located import located
from towerd.errors import ConfigError, ModelError
from towerd.settings.config import Config
from towerd.settings.sources import load

REPO = "owner/tiny-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub with a model that sees, and one for drafts."""
    with hub_server() as server:
        server.repos[REPO] = {
            "tiny-Q4_K_M.gguf": b"4",
            "tiny-Q8_0.gguf": b"8",
            "mmproj-tiny-F16.gguf": b"p",
        }
        server.repos["owner/draft-GGUF"] = {"draft-Q8_0.gguf": b"d"}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("towerd.system.paths.models_dir", lambda: tmp_path / "models")
        yield server


def content(path: Path | str | None) -> bytes:
    assert path is not None
    return Path(path).read_bytes()


def test_a_repository_becomes_files(hub: HubServer) -> None:
    """With the projector and the draft model, under the repository's name."""
    config = located(Config(hf_repo=REPO, hf_repo_draft="owner/draft-GGUF"))
    assert content(config.model) == b"4"
    assert config.aliases == (f"{REPO}:Q4_K_M",)
    draft, projector = config.llama_server_args[:2], config.llama_server_args[2:]
    assert (draft[0], content(draft[1])) == ("--model-draft", b"d")
    assert (projector[0], content(projector[1])) == ("--mmproj", b"p")


def test_what_is_said_wins(hub: HubServer) -> None:
    """A file over the quantization, an alias over the name, a flag over the projector."""
    given = Config(hf_repo=f"{REPO}:Q4_K_M", hf_file="tiny-Q8_0.gguf", alias="mine")
    config = located(replace(given, llama_server_args=("--no-mmproj",)))
    assert content(config.model) == b"8"
    assert config.aliases == ("mine",)
    assert config.llama_server_args == ("--no-mmproj",)
    assert [name for name, _ in hub.downloads] == ["tiny-Q8_0.gguf"]


def test_the_vocabulary_of_an_upstream(hub: HubServer, tmp_path: Path) -> None:
    """The model alone: a running llama-server has its own projector or none."""
    given = Config(hf_repo=REPO, upstream="http://127.0.0.1:8081", slot_dir=tmp_path)
    config = located(given)
    assert content(config.model) == b"4"
    assert config.llama_server_args == ()
    assert [name for name, _ in hub.downloads] == ["tiny-Q4_K_M.gguf"]
    assert located(Config(hf_repo=REPO)).llama_server_args[0] == "--mmproj"
    named = replace(given, hf_repo=None, model=Path("tiny"))
    assert located(named).llama_server_args == ()


def test_what_was_fetched_has_a_name(hub: HubServer) -> None:
    """`-m` takes it, shortened too; a path stays as it is."""
    fetched = located(Config(hf_repo=REPO))
    hub.is_down = True
    named = located(Config(model=Path("tiny")))
    assert (named.model, named.aliases) == (fetched.model, fetched.aliases)
    assert named.llama_server_args == fetched.llama_server_args
    assert fetched.model is not None
    by_path = located(Config(model=fetched.model))
    assert (by_path.alias, by_path.llama_server_args) == (None, ())
    with pytest.raises(
        ModelError, match=f"no model tinny on this machine; nearest.* {REPO}:Q4_K_M"
    ):
        located(Config(model=Path("tinny")))


def test_the_more_special_source_names_the_model(tmp_path: Path) -> None:
    """A flag for one kind of name beats a file's for the other; in one source both are an error."""
    toml = tmp_path / "towerd.toml"
    toml.write_text('model = "a.gguf"\n')
    assert load({"hf_repo": REPO}, {}, toml).model is None
    toml.write_text(f'hf_repo = "{REPO}"\nhf_file = "x.gguf"\n')
    config = load({}, {"TOWERD_MODEL": "b.gguf"}, toml)
    assert (config.model, config.hf_repo, config.hf_file) == (Path("b.gguf"), None, None)
    with pytest.raises(ConfigError, match="not with both"):
        load({"hf_repo": REPO, "model": "a.gguf"}, {}, toml)
    with pytest.raises(ConfigError, match="also give --hf-repo OWNER/REPO"):
        load({"hf_file": "x.gguf"}, {}, None)
