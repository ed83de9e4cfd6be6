"""Sources of training text: the origin, licence and weight of each."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec

from lab.train.errors import TrainError


class TextSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the manifest."""

    origin: str
    licence: str
    kind: str
    """Group in the evaluation: human, assistant, code, task."""
    weight: float
    """Share of the tokens seen, relative to the other sources."""


def read_manifest(path: Path | None = None) -> dict[str, TextSource]:
    """Name -> source; without `path` the manifest of the bundled model. Raises TrainError."""
    try:
        if path is None:
            text = (files("towerd.codec") / "data" / "manifest.toml").read_text()
        else:
            text = path.read_text()
        table = msgspec.convert(tomllib.loads(text), dict[str, TextSource])
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"The manifest cannot be read: {error}.") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise TrainError(f"{path} is not a manifest of training data: {error}.") from error
    if not table or min(source.weight for source in table.values()) <= 0:
        raise TrainError(f"{path} needs sources, each with a weight above 0.")
    return table
