"""`towerctl bench`: the benchmarks of the package, and those of the laboratory by the same way. Each
imports its benchmark when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from towerd.cli.bench.harness.command import MODEL, QUICK, run_benchmark
from towerd.cli.bench.harness.work import RESUME_WORK, SWITCH_WORK
from towerd.cli.lab import (
    ARCHITECTURES,
    BENCHMARKS,
    CHECKOUT,
    MOVED_BENCHMARKS,
    found,
    require,
)
from towerd.cli.lazy import LazyGroup
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
    "--encrypt", is_flag=True, help="Measure an encrypted store as well, in turns with a plain one."
)
@click.option(
    "--arch", default=None, help="Measure random weights of this architecture, or of all of them."
)
def resume(
    model: Path | None,
    quick: bool,
    tokens: int,
    level_formats: str | None,
    encrypt: bool,
    arch: str | None,
) -> None:
    """Time to resume a stored session to its first token, against prefilling it."""
    if arch is not None:
        if model is not None or level_formats is not None or encrypt:
            raise click.UsageError("--arch goes with --quick and --tokens only.")
        require("towerctl bench resume --arch")
        run_benchmark(ARCHITECTURES, None, quick, arch=arch, tokens=tokens)
        return
    options = {"tokens": tokens, "level_formats": level_formats, "encrypt": encrypt}
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


TABLE = {
    "resume": "towerd.cli.bench.bench:resume",
    "switch": "towerd.cli.bench.bench:switch",
}


class Benchmarks(LazyGroup):
    """A lazy group of which some rows are the laboratory's, and listed only where that is."""

    def __init__(
        self,
        *args: Any,
        table: Mapping[str, str] | None = None,
        checkout: Path = CHECKOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, table=table, **kwargs)
        self.checkout = checkout

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """As LazyGroup, with one sentence for a benchmark of a laboratory that is not there."""
        if cmd_name in BENCHMARKS and not self._present(cmd_name) and not ctx.resilient_parsing:
            raise click.ClickException(
                f"`towerctl bench {cmd_name}` needs a checkout of towerd's repository, with "
                "towerd installed from it by `make setup`."
            )
        return super().get_command(ctx, cmd_name)

    def _present(self, name: str) -> bool:
        return (name in TABLE or found(self.checkout)) and super()._present(name)


@click.group(cls=Benchmarks, table=TABLE | BENCHMARKS, moved=MOVED_BENCHMARKS)
def bench() -> None:
    """Measure on this machine; the last line printed is one JSON object."""
