"""The laboratory, which only a checkout has: `towerctl lab`, `train` and `model`, and where the
modules are that other commands find there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from towerd.cli.lazy import LazyGroup

CHECKOUT = Path(__file__).resolve().parent.parent
"""The folder with `lab` and `cli`; in an installed package this is the package's own folder."""
LAB_COMMANDS = {
    "replay": "lab.commands.replay:replay",
    "cluster": "lab.commands.cluster:cluster",
    "reduce": "lab.commands.reduce:reduce",
    "scale": "lab.commands.scale:scale",
    "bench": "lab.bench.commands:bench",
    "train": "towerd.cli.lab:train",
}
TRAIN_COMMANDS = {
    "mini": "lab.commands.train:mini",
    "distill": "lab.commands.train:distill",
    "predictor": "lab.commands.train_predictor:predictor",
    "retrieval": "lab.commands.train:retrieval",
}
MODEL_COMMANDS = {
    "random": "lab.commands.make:random",
    "stories": "lab.commands.make:stories",
}
BENCHMARKS = {
    name: f"lab.bench.daemon_commands:{name}"
    for name in (
        "memory concurrency tools models proxy soak store footprint quality transform cold longchat"
        " volatile shared vllm workflows".split()
    )
}
"""Benchmarks of `towerctl bench`."""
MOVED_BENCHMARKS = {
    name: f"towerctl lab bench {name}"
    for name in "agents anticipation codec kernels latem policy".split()
}
ARCHITECTURES = "lab.bench.architectures"
"""The benchmark of `towerctl bench resume --arch`."""
SLOT_RIVAL = "lab.bench.slots.rival"
"""The rival of `towerctl bench switch --rival slot-proxy`."""
RANDOM_MODELS = "lab.models.kept"


def found(checkout: Path = CHECKOUT) -> bool:
    """Whether the laboratory is there; if so, make it importable."""
    if not (checkout / "lab" / "__init__.py").is_file():
        return False
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))  # processes that are spawned get it, too
    return True


def require(command: str, checkout: Path = CHECKOUT) -> None:
    """Raises ClickException, one sentence, unless the laboratory is there."""
    if not found(checkout):
        raise click.ClickException(
            f"The laboratory is not installed: `{command}` works in a checkout of "
            "towerd's repository, with towerd installed from there by `make setup`."
        )


def laboratory_module(module: str, command: str) -> ModuleType:
    """A module of the laboratory that `command` needs. Raises ClickException without one."""
    require(command)
    return importlib.import_module(module)


def random_models() -> ModuleType | None:
    """The module that makes models of random weights; None without a laboratory."""
    return importlib.import_module(RANDOM_MODELS) if found() else None


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
        if not ctx.resilient_parsing:
            require(ctx.command_path, self.checkout)
        return super().parse_args(ctx, args)

    def _present(self, name: str) -> bool:
        return found(self.checkout) and super()._present(name)


@click.group(cls=Laboratory, table=LAB_COMMANDS)
def lab() -> None:
    """Run what the daemon does not need: replays, rival policies, training, studies (in a
    checkout)."""


@click.group(cls=Laboratory, table=TRAIN_COMMANDS)
def train() -> None:
    """Train small models: the language models of the codec, the predictor of workflows (in a
    checkout)."""


@click.group(cls=Laboratory, table=MODEL_COMMANDS)
def model() -> None:
    """Make GGUF files: random weights of any shape, or a llama2.c story model (in a checkout)."""
