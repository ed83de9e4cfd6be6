"""Models of random weights that benchmarks share, kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

import click
from platformdirs import user_cache_path

from lab.models.random_gguf import PRESETS, Shape, make_random_gguf
from lab.models.vision import Kind, Tower, make_projector


def preset_model(preset: str) -> Path:
    """The preset's GGUF, written on first use; stderr says so."""
    return random_model(preset, PRESETS[preset], announce=True)


def random_model(name: str, shape: Shape, *, seed: int = 0, announce: bool = False) -> Path:
    """NAME.gguf with random weights, written to the user's cache on first use; `announce` says so
    on stderr."""
    path = _path(name)
    if not path.exists():
        if announce:
            said = f"Writing the {name} model with random weights to {path} (once) ..."
            click.echo(said, err=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        make_random_gguf(temporary, shape, seed=seed)
        temporary.replace(path)
    return path


def random_projector(name: str, n_embd_text: int, kind: Kind, tower: Tower) -> Path:
    """NAME.gguf: a projector with random weights, written to the user's cache on first use."""
    path = _path(name)
    if not path.exists():
        make_projector(path, n_embd_text, kind=kind, tower=tower)
    return path


def _path(name: str) -> Path:
    return user_cache_path("towerd") / "bench" / f"{name}.gguf"
