"""Options that benchmarks share."""

from __future__ import annotations

from pathlib import Path

import click

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)

MODEL = click.option(
    "--model",
    "-m",
    type=FILE,
    help="GGUF to measure; default: random weights of the 1B shape (written once).",
)
QUICK = click.option("--quick", is_flag=True, help="A smaller shape; about two minutes.")
