"""The models in the folders of programs: towerd's own, and those of llama.cpp, the Hugging Face Hub,
LM Studio and Ollama.

Ollama's names lead to manifests, and these to GGUFs that are named by their hashes:
manifests/registry.ollama.ai/library/llama3.2/1b     JSON: layers with a media type and a digest
blobs/sha256-...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from towerd.models.hub.cache import hub_cache, snapshots
from towerd.models.hub.choice import best_projector
from towerd.models.hub.file_names import FileName
from towerd.system import paths

TOWERD, BUNDLED, LLAMA_CPP, HUB = "towerd", "bundled", "llama.cpp", "Hugging Face"
OLLAMA, LM_STUDIO = "Ollama", "LM Studio"
"""The sources of models."""
OLLAMA_SYSTEM_DIR = Path("/usr/share/ollama/.ollama/models")
"""Where the service that Ollama's installer sets up on Linux keeps them."""
_OWN = ("registry.ollama.ai/library/", "registry.ollama.ai/")
"""What Ollama leaves out of names."""
_MODEL = "application/vnd.ollama.image.model"
_PROJECTOR = "application/vnd.ollama.image.projector"
_MANIFEST_BYTES_MAX = 2**20
_MANIFEST = "manifest="
"""llama.cpp's old cache has files manifest=OWNER=REPO=TAG.json beside OWNER_REPO_FILE."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's name and files; nothing was read of them yet."""

    name: str
    path: Path
    """Its file, or the first of several."""
    source: str
    """The program that keeps it there."""
    projector: Path | None = None
    """What encodes its pictures and sounds, if it is known."""

    @property
    def base(self) -> str:
        """The name without its tag or quantization."""
        return self.name.partition(":")[0]


class _Layer(msgspec.Struct):
    media_type: str = msgspec.field(name="mediaType")
    digest: str


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


def places(env: Mapping[str, str] = os.environ) -> dict[str, list[Path]]:
    """Source -> its folders, whether they exist or not."""
    llama_cpp = [Path(env["LLAMA_CACHE"]).expanduser()] if env.get("LLAMA_CACHE") else []
    return {
        TOWERD: [paths.models_dir()],
        HUB: [hub_cache(env)],
        LLAMA_CPP: [*llama_cpp, _system_cache(env) / "llama.cpp"],
        OLLAMA: (
            [Path(env["OLLAMA_MODELS"]).expanduser()]
            if env.get("OLLAMA_MODELS")
            else [Path("~/.ollama/models").expanduser(), OLLAMA_SYSTEM_DIR]
        ),
        LM_STUDIO: [
            Path("~/.lmstudio/models").expanduser(),
            Path("~/.cache/lm-studio/models").expanduser(),
        ],
    }


def _system_cache(env: Mapping[str, str]) -> Path:
    if sys.platform == "darwin":
        return Path("~/Library/Caches").expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def flat_models(folder: Path, source: str) -> Iterator[FoundModel]:
    """The GGUFs that lie in `folder` itself, by file name; those with a manifest of llama.cpp have
    the repository in their name."""
    with suppress(OSError):
        files = sorted(path.name for path in folder.iterdir() if path.is_file())
        repos = [
            file.removeprefix(_MANIFEST).removesuffix(".json").split("=")[:2]
            for file in files
            if file.startswith(_MANIFEST)
        ]
        for name in _names(files):
            repo = next((r for r in repos if name.path.startswith("_".join(r) + "_")), None)
            if repo is None:
                yield FoundModel(name.path, folder / name.path, source)
            else:
                prefix = "_".join(repo) + "_"
                siblings = [
                    each for each in _names(files, all=True) if each.path.startswith(prefix)
                ]
                yield _in_repo("/".join(repo), folder, name, siblings, source)


def hub_models(folder: Path, source: str) -> Iterator[FoundModel]:
    """The models in a cache of the Hub's layout. Of a file in several snapshots the first counts."""
    seen: set[tuple[str, str]] = set()
    for snapshot in snapshots(folder):
        siblings = list(_names(snapshot.files, all=True))
        for name in _names(snapshot.files):
            if (snapshot.repo, name.path) not in seen:
                seen.add((snapshot.repo, name.path))
                yield _in_repo(snapshot.repo, snapshot.folder, name, siblings, source)


def nested_models(folder: Path, source: str) -> Iterator[FoundModel]:
    """LM Studio's: OWNER/REPO/FILE below `folder`."""
    with suppress(OSError):
        for repo in sorted(path for path in folder.glob("*/*") if path.is_dir()):
            files = sorted(path.relative_to(repo).as_posix() for path in repo.rglob("*.gguf"))
            siblings = list(_names(files, all=True))
            for name in _names(files):
                owner_repo = repo.relative_to(folder).as_posix()
                yield _in_repo(owner_repo, repo, name, siblings, source)


def _in_repo(
    repo: str, folder: Path, name: FileName, siblings: Iterable[FileName], source: str
) -> FoundModel:
    """A model named OWNER/REPO:QUANT, or OWNER/REPO/FILE if that would name two."""
    others = [each for each in siblings if each.is_model and each.path != name.path]
    is_unique = name.quant and all(each.quant != name.quant for each in others)
    projector = best_projector(siblings, name)
    return FoundModel(
        f"{repo}:{name.quant}" if is_unique else f"{repo}/{name.path}",
        folder / name.path,
        source,
        folder / projector.path if projector else None,
    )


def _names(files: Iterable[str], *, all: bool = False) -> Iterator[FileName]:
    """The GGUFs of `files`: those that are models, or all."""
    for name in map(FileName.parse, files):
        if name is not None and (all or name.is_model):
            yield name


def ollama_models(folder: Path, source: str) -> Iterator[FoundModel]:
    """The models in `folder`, by name. A manifest that cannot be read, or has no GGUF, is left
    out: Ollama does not list it either."""
    manifests = folder / "manifests"
    with suppress(OSError):
        for path in sorted(manifests.rglob("*")):
            manifest = _manifest(path)
            if manifest is None:
                continue
            model = _blob(folder, manifest, _MODEL)
            if model is not None:
                name = _tagged(path.relative_to(manifests))
                projector = _blob(folder, manifest, _PROJECTOR)
                yield FoundModel(name, model, source, projector)


def _manifest(path: Path) -> _Manifest | None:
    try:
        if not path.is_file() or path.stat().st_size > _MANIFEST_BYTES_MAX:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _blob(folder: Path, manifest: _Manifest, media_type: str) -> Path | None:
    digests = (layer.digest for layer in manifest.layers if layer.media_type == media_type)
    for digest in digests:
        path = folder / "blobs" / Path(digest.replace(":", "-")).name
        return path if path.is_file() else None
    return None


def _tagged(path: Path) -> str:
    """registry.ollama.ai/library/llama3.2/1b -> llama3.2:1b; other registries keep their names."""
    text = path.parent.as_posix()
    for own in _OWN:
        text = text.removeprefix(own)
    return f"{text}:{path.name}"


READERS: Mapping[str, tuple[Callable[[Path, str], Iterator[FoundModel]], ...]] = {
    TOWERD: (flat_models,),
    HUB: (hub_models,),
    LLAMA_CPP: (hub_models, flat_models),
    OLLAMA: (ollama_models,),
    LM_STUDIO: (nested_models,),
}
"""How the folders of each source are read."""
