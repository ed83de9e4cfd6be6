"""A click group whose commands are imported when they are used, so that --help stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import click

from towerd.errors import TowerdError


class Group(click.Group):
    """A group that points to moved commands. moved: old name -> new command line."""

    def __init__(self, *args: Any, moved: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moved = dict(moved or {})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first argument."""
        if args[0] in self.moved:
            raise click.UsageError(
                f"`{ctx.command_path} {args[0]}` is `{self.moved[args[0]]}` now."
            )
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group given as a table: command name -> "module:attribute".

    Rows whose module is not in this installation are left out. An expected failure
    (TowerdError) becomes one sentence on stderr and exit code 1; wrong usage stays click's 2.
    """

    def __init__(self, *args: Any, table: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = dict(table or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return [name for name in self.table if self._present(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or None if there is none of that name."""
        if cmd_name not in self.table or not self._present(cmd_name):
            return None
        module, attribute = self.table[cmd_name].split(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.table[cmd_name]} is not a click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except TowerdError as error:
            raise click.ClickException(error.message) from error
        except MemoryError as error:
            raise click.ClickException(
                "There is not enough memory: close other programs, or raise the limit (ulimit -v)."
            ) from error

    def _present(self, name: str) -> bool:
        return find_spec(self.table[name].split(":")[0]) is not None
