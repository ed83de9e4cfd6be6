"""What the commands of benchmarks share: their options, and running one."""

from __future__ import annotations

import asyncio
import importlib
import time
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
QUICK = click.option("--quick", is_flag=True, help="A smaller shape; five minutes at most.")


def trained_model_option(text: str) -> Callable[[Command], Command]:
    """`--model` of a benchmark that random weights are no use for. text: what the GGUF is for."""
    return click.option("--model", "-m", type=FILE, help=f"{text}; default: the bundled model.")


def plot_option(text: str) -> Callable[[Command], Command]:
    """`--plot`, as `plot_path`. text: what to write, such as "Write the curve"."""
    return click.option("--plot", "plot_path", type=NEW_FILE, help=f"{text} here, as .png or .svg.")


def run_benchmark(module: str, model: Path | None, quick: bool, **options: Any) -> Report:
    """Call `run` of a module, which is imported now, and show its report, with how long it took; while
    it runs, that it does. A quick one says first how long it takes on two slow cores."""
    from towerd.cli.bench.harness.work import QUICK_WORK
    from towerd.cli.output import progress_bar
    from towerd.cli.progress import duration

    name = module.removeprefix("towerd.cli.")
    benchmark = importlib.import_module(module)
    if quick and model is None and name in QUICK_WORK:
        said = duration(QUICK_WORK[name].seconds)
        click.echo(f"{name} --quick: about {said} on two slow cores.", err=True)
    began = time.monotonic()
    with progress_bar() as bar:
        bar.add_task(name, total=None)
        report: Report = asyncio.run(benchmark.run(model, quick, **options))
    report.details["took_s"] = round(time.monotonic() - began, 1)
    report.show()
    return report
