"""`towerctl bench`: the benchmarks of the package, and those of the laboratory by the same way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from towerd.cli.lab import BENCHMARKS, CHECKOUT, MOVED_BENCHMARKS, found
from towerd.cli.lazy import LazyGroup

TABLE = {
    "resume": "towerd.cli.bench.commands:resume",
    "switch": "towerd.cli.bench.commands:switch",
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
                f"`towerctl bench {cmd_name}` is in the source checkout: towerd's repository, with "
                "towerd installed from there by `make setup`."
            )
        return super().get_command(ctx, cmd_name)

    def _present(self, name: str) -> bool:
        return (name in TABLE or found(self.checkout)) and super()._present(name)


@click.group(cls=Benchmarks, table=TABLE | BENCHMARKS, moved=MOVED_BENCHMARKS)
def bench() -> None:
    """Measure on this machine; the last line printed is one JSON object."""
