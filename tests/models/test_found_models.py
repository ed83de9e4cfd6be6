"""Finding models in folders as other programs lay them out, and by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from towerd.errors import ModelError
from towerd.models.bundled import bundled_model, find_entry
from towerd.models.local.folders import FoundModel
from towerd.models.local.names import find_named, found_models

Put: TypeAlias = Callable[[str], Path]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models."""
    for name in ("LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("towerd.system.paths.models_dir", lambda: tmp_path / "towerd")
    monkeypatch.setattr("towerd.models.local.folders.OLLAMA_SYSTEM_DIR", tmp_path / "none")
    return tmp_path


@pytest.fixture
def put(home: Path) -> Put:
    """Copies the bundled model to a path below the home."""

    def copy(name: str) -> Path:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundled_model(), path)
        return path

    return copy


def put_repo(put: Put, cache: str, repo: str, *files: str, commit: str = "a" * 40) -> Path:
    """A repository as huggingface_hub and llama.cpp keep it; returns its snapshot."""
    name = f"{cache}/models--{repo.replace('/', '--')}"
    folder = Path(os.environ["HOME"]) / name
    for number, file in enumerate(files):
        blob = put(f"{name}/blobs/{commit[:8]}{number}")
        link = folder / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit


def put_ollama(put: Put, home: Path, name: str, *, projector: bool = False) -> Path:
    """A model as Ollama keeps it; returns its blob."""
    digest = f"{sum(name.encode()):064x}"
    blob = put(f".ollama/models/blobs/sha256-{digest}")
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
    ]
    if projector:
        put(f".ollama/models/blobs/sha256-p{digest}")
        kind = "application/vnd.ollama.image.projector"
        layers.append({"mediaType": kind, "digest": f"sha256:p{digest}"})
    manifest = home / ".ollama/models/manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return blob


def names() -> dict[str, str]:
    return {model.name: model.source for model in found_models()}


def test_every_program_is_looked_at(home: Path, put: Put) -> None:
    put("towerd/mine.gguf")
    put_repo(put, ".cache/huggingface/hub", "ggml-org/tiny-GGUF", "tiny-Q4_K_M.gguf", "README.md")
    put(".cache/llama.cpp/some.gguf")
    put(".cache/llama.cpp/unsloth_big-GGUF_big-Q8_0.gguf")
    (home / ".cache/llama.cpp/manifest=unsloth=big-GGUF=Q8_0.json").write_text("{}")
    put_ollama(put, home, "registry.ollama.ai/library/llama3.2/1b")
    put_ollama(put, home, "registry.ollama.ai/someone/theirs/latest")
    put_ollama(put, home, "hf.co/bartowski/x-GGUF/Q4_K_M")
    put(".lmstudio/models/lmstudio-community/q-GGUF/q-Q6_K.gguf")
    put(".cache/lm-studio/models/old/r-GGUF/r.gguf")
    assert names() == {
        "mine.gguf": "towerd",
        "ggml-org/tiny-GGUF:Q4_K_M": "Hugging Face",
        "some.gguf": "llama.cpp",
        "unsloth/big-GGUF:Q8_0": "llama.cpp",
        "hf.co/bartowski/x-GGUF:Q4_K_M": "Ollama",
        "llama3.2:1b": "Ollama",
        "someone/theirs:latest": "Ollama",
        "lmstudio-community/q-GGUF:Q6_K": "LM Studio",
        "old/r-GGUF/r.gguf": "LM Studio",
    }


def test_variables_name_other_folders(
    home: Path, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_repo(put, "a", "o/one-GGUF", "one-Q4_0.gguf")
    put_repo(put, "b", "o/two-GGUF", "two-Q4_0.gguf")
    (home / ".ollama").mkdir()
    put_ollama(put, home, "registry.ollama.ai/library/three/latest")
    (home / ".ollama/models").rename(home / "c")
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "a"))
    monkeypatch.setenv("LLAMA_CACHE", str(home / "b"))
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "c"))
    assert names() == {
        "o/one-GGUF:Q4_0": "Hugging Face",
        "o/two-GGUF:Q4_0": "llama.cpp",
        "three:latest": "Ollama",
    }


def test_projectors_and_parts_belong_to_their_model(home: Path, put: Put) -> None:
    hub = ".cache/huggingface/hub"
    parts = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    snapshot = put_repo(put, hub, "o/m", *parts, "mmproj-F16.gguf", "m-Q4_K_M.gguf")
    put_ollama(put, home, "registry.ollama.ai/library/eyes/latest", projector=True)
    found = {model.name: model for model in found_models()}
    assert set(found) == {"o/m:Q8_0", "o/m:Q4_K_M", "eyes:latest"}
    assert found["o/m:Q8_0"].path == snapshot / parts[0]
    assert found["o/m:Q8_0"].projector == snapshot / "mmproj-F16.gguf"
    assert found["eyes:latest"].projector is not None


def test_a_file_counts_once_and_broken_entries_do_not(home: Path, put: Put) -> None:
    hub = ".cache/huggingface/hub"
    snapshot = put_repo(put, hub, "o/m", "m-Q4_0.gguf")
    put_repo(put, hub, "o/m", "m-Q8_0.gguf", commit="b" * 40)
    (snapshot / "gone-Q2_K.gguf").symlink_to("nowhere")
    (home / "towerd").mkdir()
    os.link((snapshot / "m-Q4_0.gguf").resolve(), home / "towerd/same.gguf")
    manifests = home / ".ollama/models/manifests/registry.ollama.ai/library/bad"
    manifests.mkdir(parents=True)
    (manifests / "a").write_text("not JSON")
    (manifests / "b").write_text('{"layers": [{"mediaType": 1}]}')
    (manifests / "c").write_bytes(b"\xff\xfe")
    assert names() == {"same.gguf": "towerd", "o/m:Q8_0": "Hugging Face"}


def test_a_repository_with_a_broken_part(home: Path, put: Put) -> None:
    """Neither a dangling link nor the lack of refs hides its other snapshots."""
    snapshot = put_repo(put, ".cache/huggingface/hub", "o/m", "m-Q4_0.gguf")
    (snapshot.parent / ("b" * 40)).symlink_to("nowhere")
    (snapshot.parents[1] / "refs/other").write_bytes(b"\xff")
    assert names() == {"o/m:Q4_0": "Hugging Face"}
    shutil.rmtree(snapshot.parents[1] / "refs")
    assert names() == {"o/m:Q4_0": "Hugging Face"}


MODELS = [
    FoundModel(name, Path(name), "here")
    for name in (
        "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
        "ggml-org/gemma-3-4b-it-GGUF:Q8_0",
        "unsloth/Qwen3-4B-GGUF:Q6_K",
        "llama3.2:1b",
        "llama3.2:3b",
        "mistral:latest",
    )
]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3.2:3b", "llama3.2:3b"),
        ("mistral", "mistral:latest"),
        ("qwen3", "unsloth/Qwen3-4B-GGUF:Q6_K"),
        ("ggml-org/gemma-3-4b-it-GGUF", "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"),
        ("GGML-ORG/gemma-3-4b-it-gguf:q8_0", "ggml-org/gemma-3-4b-it-GGUF:Q8_0"),
        ("gemma-3-4b-it-GGUF:Q8", "ggml-org/gemma-3-4b-it-GGUF:Q8_0"),
    ],
)
def test_names_and_shortenings(text: str, name: str) -> None:
    assert find_named(text, MODELS).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama3.2", "llama3.2 could be llama3.2:1b or llama3.2:3b: give more of the name."),
        ("gemma", "gemma could be ggml-org/.*Q4_K_M or ggml-org/.*Q8_0: give more of the name."),
        (
            "mistrl",
            "no model mistrl on this machine; nearest is mistral:latest: towerd models lists",
        ),
        ("wen3", "There is no model wen3 on this machine"),
        ("someone/new-GGUF:Q4_0", "towerd serve -hf someone/new-GGUF:Q4_0 fetches it"),
        ("llama3.2.gguf", "There is no model llama3.2.gguf on this machine; nearest"),
    ],
)
def test_names_that_are_not_clear(text: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as error:
        find_named(text, MODELS)
    assert error.value.message.count("\n") == 0


def test_a_path_is_never_taken_for_a_name(home: Path, put: Put) -> None:
    put("towerd/mine.gguf")
    for path in (home / "mine", Path("../mine")):
        with pytest.raises(ModelError, match=f"There is no model at {path}"):
            find_entry(path)
    with pytest.raises(ModelError, match="is a folder: name a file in it, or .* --models-dir"):
        find_entry(home / "towerd")
    assert find_entry(Path("mine")).path == home / "towerd/mine.gguf"


def test_a_name_that_no_file_can_have(home: Path) -> None:
    name = "x" * 300
    for path in (home / name, Path(name)):
        with pytest.raises(ModelError, match="There is no model "):
            find_entry(path)
