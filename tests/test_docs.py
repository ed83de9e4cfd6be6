"""The documents keep up with the program: every command, option and setting has its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import click
import pytest

from towerd.cli.main import towerctl, towerd
from towerd.cli.options import default_text
from towerd.config import ENV_PREFIX, settings

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ROOT / "cli" / "README.md"
SETTINGS = ROOT / "README.md"


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """(full name, command) of `command` and everything below it."""
    path = (*path, str(command.name))
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, path)


ALL = [*commands(towerd), *commands(towerctl)]
LEAVES = [(name, command) for name, command in ALL if not isinstance(command, click.Group)]


def section(heading: str) -> str:
    """The text under `heading` of cli/README.md up to the next heading."""
    pattern = rf"^#+ `{re.escape(heading)}[^`]*`\n(.*?)(?=^#|\Z)"
    found = re.search(pattern, COMMANDS.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"cli/README.md has no heading `{heading} ...`"
    return found[1]


def _is_ours(parameter: click.Parameter) -> TypeGuard[click.Option]:
    """llama-server's own flags are hidden, and documented by it."""
    return isinstance(parameter, click.Option) and not parameter.hidden


@pytest.mark.parametrize(("name", "command"), LEAVES, ids=[name for name, _ in LEAVES])
def test_command_is_documented(name: str, command: click.Command) -> None:
    """Each command has its heading, and each of its options stands under it."""
    text = section(name)
    for parameter in command.params:
        if _is_ours(parameter) and parameter.name not in settings():
            assert f"`{parameter.opts[0]}" in text or f"`{parameter.opts[-1]}" in text, (
                parameter.name
            )


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_command_says_what_it_does(name: str, command: click.Command) -> None:
    """--help is never empty, for commands and for their options."""
    assert command.help
    for parameter in command.params:
        if _is_ours(parameter):
            assert parameter.help, parameter.name


def test_documented_commands_exist() -> None:
    """No heading is left of a command that went away."""
    headings = re.findall(r"^#+ `((?:towerd|towerctl)[^`]*)`$", COMMANDS.read_text(), re.MULTILINE)
    known = {name for name, _ in ALL}
    for heading in headings:
        words = [word for word in heading.split() if re.fullmatch(r"[a-z0-9-]+", word)]
        assert any(" ".join(words[:n]) in known for n in range(len(words), 1, -1)), heading


@pytest.mark.parametrize("name", list(settings()))
def test_setting_is_documented(name: str) -> None:
    """Each setting has its row in the README's table, and the row says what --help says."""
    spec = settings()[name]
    row = re.search(rf"^\| `{name}` \|(.*)$", SETTINGS.read_text(), re.MULTILINE)
    assert row, f"README.md has no row for {name}"
    assert all(f"`{flag}`" in row[1] for flag in (*spec.flags, *spec.off_flags))
    assert f"| {default_text(name, spec)} | {spec.help}" in row[1]


def test_readme_names_the_environment_rule() -> None:
    assert f"`{ENV_PREFIX}" in SETTINGS.read_text()
