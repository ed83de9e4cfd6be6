"""The models inside the package: one so that a first start needs no download, one that finds again
what it was told, for measuring what a long chat may drop."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from towerd import paths
from towerd.errors import ModelError

NAME = "stories260K.gguf"
RETRIEVAL_NAME = "retrieval.gguf"


def bundled_model(name: str = NAME) -> Path:
    """The path of a bundled GGUF. Raises ModelError if the installation lacks it."""
    path = Path(str(files("towerd") / "data" / name))
    if not path.is_file():
        raise ModelError(f"{path} is missing: install towerd again, or name a model with -m.")
    return path


def retrieval_model() -> Path:
    """The path of what `towerctl train retrieval` made. Raises ModelError."""
    return bundled_model(RETRIEVAL_NAME)


def find_model(model: Path | None) -> Path:
    """The file that `model` means: None is the bundled one, a bare file name that is not here is
    looked for in the models directory. Raises ModelError."""
    if model is None:
        return bundled_model()
    candidates = [model]
    if not model.is_absolute() and len(model.parts) == 1:
        candidates.append(paths.models_dir() / model)
    for path in candidates:
        if path.is_file():
            return path
    places = " nor ".join(str(path) for path in candidates)
    raise ModelError(f"There is no model at {places}.")
