"""Repositories in a cache of the Hugging Face Hub's layout, which llama.cpp uses, too.

models--OWNER--REPO/refs/main                     the commit
models--OWNER--REPO/snapshots/COMMIT/FILE         links into blobs/
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A commit of a repository, with those of its files that are on this machine."""

    repo: str
    folder: Path
    files: tuple[str, ...]
    """Paths below the folder, sorted; links whose target is gone are left out."""


def hub_cache(env: Mapping[str, str] = os.environ) -> Path:
    """The folder in which huggingface_hub keeps repositories, by its variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(variable):
            return Path(env[variable]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def snapshots(cache: Path) -> Iterator[Snapshot]:
    """All snapshots in a cache, ordered by repository; those of one as `snapshots_of` has them."""
    with suppress(OSError):
        for folder in sorted(cache.glob(f"{_PREFIX}*--*")):
            owner, _, repo = folder.name.removeprefix(_PREFIX).partition("--")
            yield from snapshots_of(cache, f"{owner}/{repo}")


def snapshots_of(cache: Path, repo: str) -> list[Snapshot]:
    """The snapshots of a repository: that of `main` first, those of other refs, then the newest.

    Others than towerd set the ref before its files are there, so that an older snapshot may have
    files that the first one lacks."""
    folder = repo_folder(cache, repo)
    with suppress(OSError, UnicodeDecodeError):
        refs = sorted((folder / "refs").iterdir(), key=lambda path: path.name != "main")
        commits = [path.read_text().strip() for path in refs if path.is_file()]
        found = list((folder / "snapshots").iterdir())
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        found.sort(key=lambda path: commits.index(path.name) if path.name in commits else len(refs))
        return [Snapshot(repo, path, _files(path)) for path in found if path.is_dir()]
    return []


def repo_folder(cache: Path, repo: str) -> Path:
    """Where a cache keeps a repository."""
    return cache / (_PREFIX + repo.replace("/", "--"))


def set_main(cache: Path, repo: str, commit: str) -> None:
    """Note that `commit`, whose files are here, is the newest. Raises OSError."""
    main = repo_folder(cache, repo) / "refs" / "main"
    main.parent.mkdir(parents=True, exist_ok=True)
    part = main.with_name(f"main.{os.getpid()}.part")
    part.write_text(commit)
    part.replace(main)


def _files(folder: Path) -> tuple[str, ...]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found))
