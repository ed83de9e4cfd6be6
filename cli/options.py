"""Config's fields as click options: the one place where a setting becomes a flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import click

from towerd.errors import ConfigError
from towerd.settings.config import defaults, settings
from towerd.settings.llama_flag_table import by_name
from towerd.settings.llama_flags import canonical, own_words, take_values, unknown_flag
from towerd.settings.setting import Setting
from towerd.settings.sources import ENV_PREFIX

Command: TypeAlias = Callable[..., Any]

COMMON = (
    "model",
    "hf_repo",
    "host",
    "port",
    "api_keys",
    "store_dir",
    "ctx_size",
    "threads",
    "hot_bytes",
    "warm_bytes",
    "fidelity",
    "engine",
)
"""The settings that most people need, in the order of --help and docs/settings.md."""
_GIVEN = "towerd.settings.llama_flags"
_ALL = "towerd.help_all"
METAVARS = {"int": "N", "float": "X", "size": "SIZE", "path": "PATH", "keys": "KEY"}


class ConfigCommand(click.Command):
    """A command with `config_options` that takes llama-server's flags, too: --help shows the common
    settings, --help-all every one."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, in which llama-server's flags may stand among towerd's."""
        if not context.resilient_parsing:
            options = [each for each in self.get_params(context) if isinstance(each, click.Option)]
            own = {name: each for each in options for name in (*each.opts, *each.secondary_opts)}
            try:
                args, context.meta[_GIVEN] = sort_words(args, own)
            except ConfigError as error:
                raise click.UsageError(error.message, context) from error
        return super().parse_args(context, args)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; those that only --help-all shows are in a section of their own."""
        parameters = {
            str(each.name): each
            for each in self.get_params(context)
            if isinstance(each, click.Option)
        }
        own = [name for name in parameters if name not in settings()]
        sections = [("Options", [*COMMON, *own])]
        if context.meta.get(_ALL):
            sections.append(("More settings", list(by_use()[1])))
        for title, names in sections:
            records = (parameters[name].get_help_record(context) for name in names)
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])


def config_options(command: Command) -> Command:
    """Give `command` an option per Config field (keyword = field name, None: not given), and
    --help-all."""
    for name, spec in reversed(settings().items()):
        command = _option(name, spec)(command)
    return click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_help_all,
        help="Show every setting and exit.",
    )(command)


def by_use() -> tuple[dict[str, Setting], dict[str, Setting]]:
    """The common settings and the others."""
    known = settings()
    others = {name: spec for name, spec in known.items() if name not in COMMON}
    return {name: known[name] for name in COMMON}, others


def _help_all(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


def _option(name: str, spec: Setting) -> Callable[[Command], Command]:
    text = f"{spec.help} [default: {default_text(name, spec)}; {ENV_PREFIX}{name.upper()}]"
    if spec.kind == "bool":
        long = f"{spec.flags[0]}/{spec.off_flags[0]}"
        return click.option(long, *spec.flags[1:], name, default=None, help=text)
    if spec.kind in ("list", "keys"):
        metavar = METAVARS.get(spec.kind, "TEXT")
        return click.option(*spec.flags, name, multiple=True, metavar=metavar, help=text)
    if spec.choices and not spec.words:
        return click.option(*spec.flags, name, type=click.Choice(spec.choices), help=text)
    if spec.kind == "path":
        return click.option(*spec.flags, name, type=click.Path(), metavar="PATH", help=text)
    # Numbers and sizes stay text here: towerd.settings.setting has one parser for flags, TOML and env.
    metavar = f"[{'|'.join(spec.choices)}]" if spec.choices else METAVARS.get(spec.kind, "TEXT")
    return click.option(*spec.flags, name, metavar=metavar, help=text)


def given_llama_flags() -> list[str]:
    """The words of the llama-server flags that were given, in order."""
    return list(click.get_current_context().meta.get(_GIVEN, []))


def sort_words(words: list[str], own: dict[str, click.Option]) -> tuple[list[str], list[str]]:
    """The words of a command line for click, and those for llama.cpp. own: the command's options by
    their spellings. Whole names are compared: click would read -mx as -m x. What comes after -- is left to click.

    Raises ConfigError for a flag that neither has."""
    ours: list[str] = []
    theirs: list[str] = []
    rest = iter(words)
    for word in rest:
        given, is_joined, value = word.partition("=") if word.startswith("--") else (word, "", "")
        name = canonical(given)
        if word == "--":
            return [*ours, word, *rest], theirs
        if name in own:
            option = own[name]
            n_values = 0 if option.is_flag or option.count else 1
            values = [] if is_joined else take_values(name, n_values, rest)
            ours += [f"{name}={value}"] if is_joined else [name, *values]
        elif (flag := by_name().get(name)) is not None:
            values = [value] if is_joined else take_values(name, flag.n_values, rest)
            ours += own_words(flag, [name, *values])
            if flag.use != "setting":
                theirs += [f"{name}={value}"] if is_joined else [name, *values]
        else:
            raise unknown_flag(word, own)
    return ours, theirs


def default_text(name: str, spec: Setting) -> str:
    """The default of a setting as help and docs/settings.md spell it."""
    if spec.auto:
        return spec.auto
    value = defaults()[name]
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if spec.kind == "size" and value and value % 2**20 == 0:
        return f"{value // 2**20} MiB"
    return str(value)
