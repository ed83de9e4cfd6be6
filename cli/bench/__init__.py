"""Benchmarks that a person can run on their own machine and model: `towerctl bench NAME`."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import click

_MODEL = click.option(
    "--model", "-m", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF to measure; default: random weights of the 1B shape (written once).",
)  # fmt: skip
_QUICK = click.option("--quick", is_flag=True, help="A smaller shape; about two minutes.")


@click.group()
def bench() -> None:
    """Measure on this machine; the last line printed is one JSON object."""


@bench.command()
@_MODEL
@_QUICK
@click.option("--tokens", type=click.IntRange(64, 131072), default=2048, show_default=True,
              help="Length of the stored session.")  # fmt: skip
def resume(model: Path | None, quick: bool, tokens: int) -> None:
    """A stored session back to its first token, against prefilling it."""
    _run("resume", model, quick, tokens=tokens)


@bench.command()
@_MODEL
@_QUICK
@click.option("--rounds", type=click.IntRange(1, 100), default=None,
              help="How often every chat is continued; default 3, with --quick 2.")  # fmt: skip
def switch(model: Path | None, quick: bool, rounds: int | None) -> None:
    """Forty chats over one base, round robin, against llama-server's defaults."""
    _run("switch", model, quick, rounds=rounds)


@bench.command()
@_MODEL
@_QUICK
def concurrency(model: Path | None, quick: bool) -> None:
    """Tokens a second at 1, 2, 4 and 8 streams, against llama-server with the same flags."""
    _run("concurrency", model, quick)


@bench.command()
@_QUICK
def store(quick: bool) -> None:
    """Load time, look-up time and size of a store of 100,000 segments."""
    _run("store", None, quick)


def _run(name: str, model: Path | None, quick: bool, **options: Any) -> None:
    module = importlib.import_module(f"towerd.cli.bench.{name}")
    report = asyncio.run(module.run(model, quick, **options))
    report.show()
