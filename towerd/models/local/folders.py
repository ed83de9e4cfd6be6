"""Folders of GGUFs: towerd's own, and those of llama.cpp, the Hugging Face Hub and LM Studio."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from towerd.models.hub.cache import hub_cache, snapshots
from towerd.models.hub.choice import best_projector
from towerd.models.hub.file_names import FileName
from towerd.models.local.found import HUB, LLAMA_CPP, LM_STUDIO, TOWERD, FoundModel
from towerd.system import paths

_MANIFEST = "manifest="
"""llama.cpp's old cache has files manifest=OWNER=REPO=TAG.json beside OWNER_REPO_FILE."""


def places(env: Mapping[str, str] = os.environ) -> dict[str, list[Path]]:
    """Source -> its folders, whether they exist or not."""
    llama_cpp = [Path(env["LLAMA_CACHE"]).expanduser()] if env.get("LLAMA_CACHE") else []
    return {
        TOWERD: [paths.models_dir()],
        HUB: [hub_cache(env)],
        LLAMA_CPP: [*llama_cpp, _system_cache(env) / "llama.cpp"],
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
