"""Which files of a repository are the model that was asked for.

The rules are llama-server's (`common/download.cpp`: find_best_model, find_best_sibling), so that a
repository means the same model to both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from towerd.errors import ModelError
from towerd.models.hub.file_names import FileName

PREFERRED_QUANTS = ("Q4_K_M", "Q8_0")
"""Taken in this order if no quantization is named; then the first model of the list."""
_PART = r"\w+(?:[.-]\w+)*"
REPO = re.compile(f"{_PART}/{_PART}", re.ASCII)
REPO_CHARS_MAX = 96
NAMES_SHOWN_MAX = 12


@dataclass(frozen=True, slots=True)
class RepoName:
    """A repository, and the quantization that was asked for (empty: none)."""

    repo: str
    quant: str

    @classmethod
    def parse(cls, text: str) -> RepoName:
        """Of OWNER/REPO[:QUANT]. Raises ModelError."""
        repo, _, quant = text.partition(":")
        is_repo = REPO.fullmatch(repo) and len(repo) <= REPO_CHARS_MAX
        if not is_repo or not re.fullmatch(r"[A-Za-z0-9_.-]*", quant):
            raise ModelError(
                f"{text!r} names no repository: give OWNER/REPO or OWNER/REPO:QUANT, such as "
                "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M."
            )
        return cls(repo, quant)

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True, slots=True)
class Choice:
    """Paths inside a repository."""

    model: FileName
    projector: str | None

    @property
    def files(self) -> list[str]:
        """All files to have, the model's first one first."""
        return self.model.parts() + ([self.projector] if self.projector else [])


def choose(
    wanted: RepoName, files: Iterable[str], *, file: str = "", with_projector: bool = True
) -> Choice:
    """What to take of the repository that consists of `files`. `file` is taken if it is given.
    Raises ModelError, which says what there is instead."""
    names = [name for name in map(FileName.parse, files) if name is not None]
    model = best_model(names, wanted.quant) if not file else _named(names, file)
    if model is None:
        raise ModelError(_missing(wanted, file, names))
    absent = set(model.parts()).difference(name.path for name in names)
    if absent:
        raise ModelError(
            f"{wanted.repo} lacks {min(absent)}, a part of its model {model.stem}: name another "
            "quantization."
        )
    projector = best_projector(names, model) if with_projector else None
    return Choice(model, projector.path if projector else None)


def best_model(names: Sequence[FileName], quant: str = "") -> FileName | None:
    """The model of that quantization; without one the preferred ones, then the first."""
    models = [name for name in names if name.is_model]
    for wanted in (quant,) if quant else PREFERRED_QUANTS:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        for name in models:
            if pattern.search(name.path):
                return name
    return models[0] if models and not quant else None


def best_projector(names: Iterable[FileName], model: FileName) -> FileName | None:
    """The projector in the model's folder or one above it: the nearest folder counts first, then
    the nearest number of bits, then the order of the list."""
    folders = model.path.split("/")[:-1]
    best, best_rank = None, (0, 0)
    for name in names:
        inside = name.path.split("/")[:-1]
        if name.is_projector and inside == folders[: len(inside)]:
            rank = (len(inside), -abs(name.bits - model.bits))
            if best is None or rank > best_rank:
                best, best_rank = name, rank
    return best


def _named(names: Iterable[FileName], file: str) -> FileName | None:
    return next((name for name in names if name.path == file), None)


def _missing(wanted: RepoName, file: str, names: Sequence[FileName]) -> str:
    models = [name for name in names if name.is_model]
    if not models:
        return (
            f"{wanted.repo} has no GGUF of a model: look for a repository whose name ends in -GGUF."
        )
    if file:
        return f"{wanted.repo} has no file {file}; it has {_listed(n.path for n in models)}."
    quants = list(dict.fromkeys(n.quant or n.path for n in models))
    return f"{wanted.repo} has no {wanted.quant}; it has {_listed(quants)}."


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - NAMES_SHOWN_MAX} more" if len(shown) > NAMES_SHOWN_MAX else ""
    return ", ".join(shown[:NAMES_SHOWN_MAX]) + more
