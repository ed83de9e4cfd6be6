"""The command line as a whole: help, errors, completion, lazy imports."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from towerd.cli.lazy import LazyGroup
from towerd.cli.main import CONTROL_COMMANDS, DAEMON_COMMANDS, towerctl, towerd
from towerd.errors import ConfigError


@pytest.mark.parametrize("group", [towerd, towerctl])
def test_help_lists_every_command(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["--help"])
    assert result.exit_code == 0
    for name in group.list_commands(click.Context(group)):
        assert f"\n  {name}" in result.output


def test_every_row_has_its_module() -> None:
    """A row without a file would be a command that silently does not exist."""
    for target in (DAEMON_COMMANDS | CONTROL_COMMANDS).values():
        assert find_spec(target.split(":")[0]) is not None, target


@pytest.mark.parametrize("group", ["towerd", "towerctl"])
def test_help_imports_nothing_heavy(group: str) -> None:
    """Tab completion and --help would otherwise take a second instead of a moment."""
    code = (
        f"import sys; from towerd.cli.main import {group} as g; g(['--help'], standalone_mode=False);"
        "heavy = {'numpy', 'aiohttp', 'llama_cpp', 'gguf', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_expected_failures_are_one_sentence() -> None:
    @click.command()
    def fail() -> None:
        """Fail."""
        raise ConfigError("It is too late.")

    class OneCommand(LazyGroup):
        """A group that needs no module for its command."""

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return fail

    result = CliRunner().invoke(OneCommand("g"), ["fail"])
    assert (result.exit_code, result.output) == (1, "Error: It is too late.\n")


def test_wrong_settings_stop_serve_before_it_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        towerd, ["serve", "--port", "http", "--store-dir", str(tmp_path / "s")], env={}
    )
    assert result.exit_code == 1
    assert result.output == "Error: --port must be a whole number, not 'http'.\n"
    assert not (tmp_path / "s").exists()


def test_wrong_usage_is_exit_code_2() -> None:
    assert CliRunner().invoke(towerctl, ["no-such-command"]).exit_code == 2
    assert CliRunner().invoke(towerd, ["serve", "--flash-attention", "on"]).exit_code == 2


@pytest.mark.parametrize("name", ["bench kernels", "replay"])
def test_a_command_that_moved_says_where_it_is(name: str) -> None:
    result = CliRunner().invoke(towerctl, [*name.split(), "--quick"], prog_name="towerctl")
    assert result.exit_code == 2
    assert f"`towerctl {name}` is `towerctl lab {name}` now." in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_both_commands(shell: str) -> None:
    result = CliRunner().invoke(towerctl, ["completion", shell])
    assert result.exit_code == 0
    assert "_TOWERD_COMPLETE" in result.output
    assert "_TOWERCTL_COMPLETE" in result.output


def test_version_as_json() -> None:
    result = CliRunner().invoke(towerd, ["version", "--json"])
    found = json.loads(result.output)
    assert set(found) == {"towerd", "llama_cpp_python", "python", "system"}
    for command in (towerd, towerctl):
        shown = CliRunner().invoke(command, ["--version"])
        assert shown.exit_code == 0
        assert shown.output.startswith(f"towerd {found['towerd']} ")


def test_model_random_and_its_errors(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    args = ["model", "random", str(out), "--layers", "1", "--embd", "64", "--heads", "2"]
    args += ["--heads-kv", "1", "--ff", "64", "--json"]
    result = CliRunner().invoke(towerctl, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["bytes"] == out.stat().st_size
    result = CliRunner().invoke(towerctl, [*args, "--layers", "0"])
    assert result.exit_code == 1
    assert result.output == "Error: Every dimension of a model must be at least 1.\n"
