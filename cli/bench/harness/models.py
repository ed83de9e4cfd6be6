"""The models that benchmarks run on: the user's own, or random weights of a known shape."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from platformdirs import user_cache_path

from towerd.models.random_gguf import PRESETS, Shape, make_random_gguf
from towerd.tokens import Ids


def bench_model(model: Path | None, preset: str) -> Path:
    """`model`, or the preset's GGUF, written to the user's cache on first use."""
    if model is not None:
        return model
    return random_model(preset, PRESETS[preset], announce=True)


def random_model(name: str, shape: Shape, *, seed: int = 0, announce: bool = False) -> Path:
    """NAME.gguf with random weights, written to the user's cache on first use; `announce` says so
    on stderr."""
    path = user_cache_path("towerd") / "bench" / f"{name}.gguf"
    if not path.exists():
        if announce:
            said = f"Writing the {name} model with random weights to {path} (once) ..."
            click.echo(said, err=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        make_random_gguf(temporary, shape, seed=seed)
        temporary.replace(path)
    return path


def random_prompt(rng: np.random.Generator, n: int, n_vocab: int) -> Ids:
    """`n` ordinary token ids (the first few hundred of a vocabulary are special or bytes)."""
    low = min(300, n_vocab // 2)
    return rng.integers(low, n_vocab, n).astype(np.int32)


def vocab_size(model: Path) -> int:
    """The vocabulary size of a GGUF. Raises ClickException."""
    from gguf import GGUFReader

    field = GGUFReader(model).get_field("tokenizer.ggml.tokens")
    if field is None:
        raise click.ClickException(f"{model} has no vocabulary.")
    return len(field.data)
