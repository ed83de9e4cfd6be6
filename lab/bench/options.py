"""Options that several benchmarks of the laboratory share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import click

from towerd.cli.bench.harness.command import FILE

Command: TypeAlias = Callable[..., Any]
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)


def trained_model_option(text: str) -> Callable[[Command], Command]:
    """`--model` of a benchmark that random weights are no use for. text: what the GGUF is for."""
    return click.option("--model", "-m", type=FILE, help=f"{text}; default: the bundled model.")


def plot_option(text: str) -> Callable[[Command], Command]:
    """`--plot`, as `plot_path`. text: what to write, such as "Write the curve"."""
    return click.option("--plot", "plot_path", type=NEW_FILE, help=f"{text} here, as .png or .svg.")
