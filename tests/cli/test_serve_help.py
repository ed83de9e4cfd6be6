"""`towerd serve --help` shows the dozen settings that most people need, --help-all every one."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from towerd.cli.main import towerd
from towerd.cli.options import COMMON
from towerd.settings.config import own_flags, settings
from towerd.settings.llama_flag_table import by_name
from towerd.settings.sources import ENV_PREFIX

COMMON_MAX = 12


def shown(*flags: str) -> tuple[str, set[str]]:
    """What the command prints, and the settings in it, --config apart."""
    done = CliRunner().invoke(towerd, ["serve", *flags], terminal_width=4000)
    assert done.exit_code == 0, done.output
    variables = re.findall(rf"; {ENV_PREFIX}([A-Z_]+)\]", done.output)
    assert len(variables) == len(set(variables))
    return done.output, {name.lower() for name in variables} - {"config"}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_the_common_settings(flag: str) -> None:
    text, names = shown(flag)
    assert len(COMMON) <= COMMON_MAX
    assert names == set(COMMON)
    assert "--help-all" in text
    assert "--config PATH" in text


def test_help_all_shows_every_setting() -> None:
    text, names = shown("--help-all")
    assert names == set(settings())
    assert text.index("--threads ") < text.index("--live-tokens ")


def test_help_after_help_all_is_short_again() -> None:
    shown("--help-all")
    assert shown("--help")[1] == set(COMMON)


def test_neither_shows_flags_of_llama_server() -> None:
    text, _ = shown("--help-all")
    theirs = [flag for name, flag in by_name().items() if name not in own_flags()]
    assert len(theirs) > 300
    for flag in theirs:
        assert not re.search(rf"^  (-\w+, )*{flag.names[0]}\b(?!-)", text, re.MULTILINE), flag.names


def test_a_setting_that_is_not_shown_is_taken() -> None:
    done = CliRunner().invoke(towerd, ["serve", "--log-level", "loud"])
    assert done.exit_code == 2
    assert "'loud' is not one of" in done.output
