"""`towerctl lab` and `towerctl train`: commands of the laboratory, which only a checkout has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from towerd.cli.lazy import LazyGroup

CHECKOUT = Path(__file__).resolve().parent.parent
"""The folder with `lab` and `cli`; in an installed package this is the package's own folder."""
LAB_COMMANDS = {
    "replay": "lab.commands.replay:replay",
    "cluster": "lab.commands.cluster:cluster",
    "reduce": "lab.commands.reduce:reduce",
    "bench": "lab.bench.commands:bench",
    "train": "towerd.cli.lab:train",
}
TRAIN_COMMANDS = {
    "mini": "lab.commands.train:mini",
    "distill": "lab.commands.train:distill",
    "predictor": "lab.commands.train_predictor:predictor",
    "retrieval": "lab.commands.train:retrieval",
}


class Laboratory(LazyGroup):
    """A lazy group whose modules are in the folder `lab` of `checkout`."""

    def __init__(
        self,
        *args: Any,
        table: Mapping[str, str] | None = None,
        checkout: Path = CHECKOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, table=table, **kwargs)
        self.checkout = checkout

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Fail with one sentence if there is no laboratory."""
        if not self._found() and not ctx.resilient_parsing:
            raise click.ClickException(
                f"The laboratory is not installed: `{ctx.command_path}` works in a checkout of "
                "towerd's repository, with towerd installed from there by `make setup`."
            )
        return super().parse_args(ctx, args)

    def _present(self, name: str) -> bool:
        return self._found() and super()._present(name)

    def _found(self) -> bool:
        """Whether the laboratory is there; if so, make it importable."""
        if not (self.checkout / "lab" / "__init__.py").is_file():
            return False
        if str(self.checkout) not in sys.path:
            sys.path.insert(0, str(self.checkout))  # processes that are spawned get it, too
        return True


@click.group(cls=Laboratory, table=LAB_COMMANDS)
def lab() -> None:
    """Run what the daemon does not need: replays, rival policies, training, studies (in a
    checkout)."""


@click.group(cls=Laboratory, table=TRAIN_COMMANDS)
def train() -> None:
    """Train small models: the language models of the codec, the predictor of workflows (in a
    checkout)."""
