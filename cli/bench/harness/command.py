"""What the commands of benchmarks share: their options, and running one."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

if TYPE_CHECKING:
    from towerd.cli.bench.harness.report import Report

Command: TypeAlias = Callable[..., Any]

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


def trained_model_option(text: str) -> Callable[[Command], Command]:
    """`--model` of a benchmark that random weights are no use for. text: what the GGUF is for."""
    return click.option("--model", "-m", type=FILE, help=f"{text}; default: the bundled model.")


def plot_option(text: str) -> Callable[[Command], Command]:
    """`--plot`, as `plot_path`. text: what to write, such as "Write the curve"."""
    return click.option("--plot", "plot_path", type=NEW_FILE, help=f"{text} here, as .png or .svg.")


def run_benchmark(module: str, model: Path | None, quick: bool, **options: Any) -> Report:
    """Call `run` of a module, which is imported now, and show its report."""
    report: Report = asyncio.run(importlib.import_module(module).run(model, quick, **options))
    report.show()
    return report
