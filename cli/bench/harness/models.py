"""The model that a benchmark runs on, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from towerd.cli.lab import random_models
from towerd.errors import ModelError
from towerd.models.bundled import default_model, has_default
from towerd.tokens import Ids


def bench_model(model: Path | None, preset: str) -> Path:
    """`model`; without one, random weights of the preset where there is a laboratory to make them, else
    SmolLM2. Raises ModelError."""
    if model is not None:
        return model
    if (models := random_models()) is not None:
        path: Path = models.preset_model(preset)
        return path
    if not has_default():
        raise ModelError(
            "There is no model to measure: name one with --model, or run towerd models get smollm2."
        )
    return default_model()


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
