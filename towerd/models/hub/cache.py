"""Repositories in a cache of the Hugging Face Hub's layout, which llama.cpp uses, too.

models--OWNER--REPO/refs/main                     the commit
models--OWNER--REPO/snapshots/COMMIT/FILE         links into blobs/
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from towerd.errors import ModelError
from towerd.models.hub.choice import Choice, RepoName

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A commit of a repository, with those of its files that are on this machine."""

    repo: str
    folder: Path
    files: tuple[str, ...]
    """Paths below the folder, sorted; links whose target is gone are left out."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub that is on this machine."""

    name: str
    """OWNER/REPO:QUANT, or without a quantization if the file's name has none."""
    path: Path
    projector: Path | None

    @classmethod
    def of(cls, wanted: RepoName, choice: Choice, folder: Path) -> HubModel:
        """The files of `choice`, in the `folder` of a snapshot."""
        quant = choice.model.quant
        name = f"{wanted.repo}:{quant}" if quant else wanted.repo
        projector = folder / choice.projector if choice.projector else None
        return cls(name, folder / choice.model.path, projector)


def hub_cache(env: Mapping[str, str] = os.environ) -> Path:
    """The folder in which huggingface_hub keeps repositories, by its variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(variable):
            return Path(os.path.expanduser(env[variable]))
    if env.get("HF_HOME"):
        return Path(os.path.expanduser(env["HF_HOME"])) / "hub"
    above = os.path.expanduser(env.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(above, "huggingface", "hub")


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
    commits = _named_commits(folder / "refs")
    found: list[tuple[int, float, Snapshot]] = []
    for path in _entries(folder / "snapshots"):
        with suppress(OSError):
            rank = commits.index(path.name) if path.name in commits else len(commits)
            age = -path.stat().st_mtime
            if path.is_dir():
                found.append((rank, age, Snapshot(repo, path, _files(path))))
    return [snapshot for _, _, snapshot in sorted(found, key=lambda each: each[:2])]


def kept(wanted: RepoName, take: Callable[[tuple[str, ...]], Choice]) -> HubModel | None:
    """The model as it is in the cache; None if no snapshot has all that `take` chooses."""
    for snapshot in snapshots_of(hub_cache(), wanted.repo):
        try:
            return HubModel.of(wanted, take(snapshot.files), snapshot.folder)
        except ModelError:
            continue
    return None


def repo_folder(cache: Path, repo: str) -> Path:
    """Where a cache keeps a repository."""
    return cache / (_PREFIX + repo.replace("/", "--"))


def set_main(cache: Path, repo: str, commit: str) -> None:
    """Note that `commit`, whose files are here, is the newest. Raises OSError."""
    main = repo_folder(cache, repo) / "refs" / "main"
    if main.is_file() and main.read_bytes() == commit.encode():  # the cache may be read-only
        return
    main.parent.mkdir(parents=True, exist_ok=True)
    part = main.with_name(f"main.{os.getpid()}.part")
    part.write_text(commit)
    part.replace(main)


def _named_commits(refs: Path) -> list[str]:
    """Those that refs name, `main` first."""
    commits = []
    for ref in sorted(_entries(refs), key=lambda path: path.name != "main"):
        with suppress(OSError, UnicodeDecodeError):
            if ref.is_file():
                commits.append(ref.read_text().strip())
    return commits


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _files(folder: Path) -> tuple[str, ...]:
    found = (path for path in folder.rglob("*") if os.path.isfile(path))
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found))
