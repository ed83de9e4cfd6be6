"""Resolves a model setting to a file, and finds the bundled models: one so that every installation
can answer, and one trained for retrieval, to measure which tokens a long chat may drop."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from towerd.errors import ModelError
from towerd.models.known import KNOWN, SMOLLM2
from towerd.models.local.folders import BUNDLED, TOWERD, FoundModel
from towerd.system import paths

NAME = "stories260K.gguf"
SHORT_NAME = "stories"
RETRIEVAL_NAME = "retrieval.gguf"
"""The model of `towerctl train retrieval`."""


def bundled_model(name: str = NAME) -> Path:
    """The path of a bundled GGUF. Raises ModelError if the installation lacks it."""
    path = Path(str(files("towerd") / "data" / name))
    if not os.path.isfile(path):
        raise ModelError(f"{path} is missing: install towerd again, or name a model with -m.")
    return path


def default_model() -> Path:
    """The model to serve if none is named: SmolLM2 if it is in the models directory, else the
    bundled story model. Raises ModelError."""
    return SMOLLM2.path if has_default() else bundled_model()


def has_default() -> bool:
    """Whether the default model is in the models directory."""
    return SMOLLM2.is_at(SMOLLM2.path)


def find_model(model: Path | None, repo: str | None = None, file: str | None = None) -> Path:
    """The file that `model` refers to (see `find_entry`), or that is served of a `repo` of the Hub,
    and there of a `file`; nothing is fetched. Raises ModelError."""
    if repo is None:
        return find_entry(model).path
    # Imported late, here and below: most starts name a file, and every module makes one longer.
    from towerd.models.hub.cache import kept
    from towerd.models.hub.choice import RepoName, choose

    wanted = RepoName.parse(repo)
    found = kept(wanted, lambda files: choose(wanted, files, file=file or ""))
    if found is None:
        raise ModelError(f"{repo} is not on this machine: run towerd models get {repo}.")
    return found.path


def find_entry(model: Path | None) -> FoundModel:
    """The model that `model` refers to; None is the default.

    What is no file is looked up in the models directory, then among the names of known models
    (`stories` is the bundled one), then among all models of this machine. Raises ModelError."""
    path = default_model() if model is None else model
    if os.path.isfile(path):  # unlike Path.is_file it raises nothing, whatever the name
        return FoundModel(path.name, path, "")
    if path.is_absolute() or path.parts[:1] in ((), ("..",)):
        if os.path.isdir(path):
            raise ModelError(
                f"{path} is a folder: name a file in it, or serve all its models with --models-dir."
            )
        raise ModelError(f"There is no model at {path}.")
    if os.path.isfile(kept := paths.models_dir() / path):
        return FoundModel(path.name, kept, TOWERD)
    if path.name in (NAME, SHORT_NAME):
        return FoundModel(NAME, bundled_model(), BUNDLED)
    if (known := KNOWN.get(str(path))) is None:
        from towerd.models.local.names import find_named, found_models

        return find_named(str(path), found_models(), [SHORT_NAME, *KNOWN])
    if not known.is_at(known.path):
        raise ModelError(f"{known.title} is not here: run towerd models get {known.name}.")
    return FoundModel(known.file, known.path, TOWERD)
