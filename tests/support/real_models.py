"""Trained models, which are not part of the tree: `make models` fetches them, and a test that wants
one skips without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from towerd.models.known import GEMMA3_270M, SMOLLM2, KnownModel
from towerd.system import paths

_FOLDER = paths.models_dir()
"""The user's own: tests/conftest.py imports this before it moves the user's directories away."""


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, the default model; skips if it is not here."""
    return _path_or_skip(SMOLLM2)


def gemma() -> Path:
    """Gemma 3 270M, a base model with sliding windows; skips if it is not here."""
    return _path_or_skip(GEMMA3_270M)


def _path_or_skip(model: KnownModel) -> Path:
    path = _FOLDER / model.file
    if not model.is_at(path):
        pytest.skip(f"{model.title} is not here: make models fetches it")
    return path
