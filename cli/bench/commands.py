"""The commands `towerctl bench resume` and `switch`; each imports its benchmark when it runs."""

from __future__ import annotations

from pathlib import Path

import click

from towerd.cli.bench.harness.command import MODEL, QUICK, run_benchmark
from towerd.cli.bench.harness.work import RESUME_WORK, SWITCH_WORK
from towerd.cli.lab import ARCHITECTURES, require
from towerd.settings.config import ENGINES


@click.command()
@MODEL
@QUICK
@click.option(
    "--tokens",
    type=click.IntRange(64, 131072),
    default=2048,
    show_default=True,
    help="Length of the stored session.",
)
@click.option(
    "--level-formats",
    default=None,
    help="Store it in these formats before resuming, such as 0=q8h; default: native.",
)
@click.option(
    "--arch", default=None, help="Measure random weights of this architecture, or of all of them."
)
def resume(
    model: Path | None, quick: bool, tokens: int, level_formats: str | None, arch: str | None
) -> None:
    """Time to resume a stored session to its first token, against prefilling it."""
    if arch is not None:
        if model is not None or level_formats is not None:
            raise click.UsageError("--arch goes with --quick and --tokens only.")
        require("towerctl bench resume --arch")
        run_benchmark(ARCHITECTURES, None, quick, arch=arch, tokens=tokens)
        return
    options = {"tokens": tokens, "level_formats": level_formats}
    run_benchmark("towerd.cli.bench.resume", model, quick, RESUME_WORK, **options)


@click.command()
@MODEL
@QUICK
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=None,
    help="How often every chat is continued; default 3, with --quick 2.",
)
@click.option(
    "--chats",
    type=click.IntRange(2, 1000),
    default=None,
    help="How many chats there are; default 40, with --quick 10.",
)
@click.option(
    "--engine",
    type=click.Choice((*ENGINES, "both")),
    default="embedded",
    show_default=True,
    help="towerd's engine; llama-server: in front of one.",
)
@click.option(
    "--rival",
    type=click.Choice(("llama-server", "slot-proxy", "both")),
    default="llama-server",
    show_default=True,
    help="What to compare with; slot-proxy: a proxy that saves whole slots.",
)
def switch(
    model: Path | None, quick: bool, rounds: int | None, chats: int | None, engine: str, rival: str
) -> None:
    """Forty chats over one base, round robin, against llama-server's defaults."""
    options = {"rounds": rounds, "chats": chats, "engine": engine, "rival": rival}
    run_benchmark("towerd.cli.bench.switch", model, quick, SWITCH_WORK, **options)
