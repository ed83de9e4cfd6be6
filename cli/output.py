"""Output for people and programs: tables, sizes, times, and text without control characters."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.progress import Lines, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PIPE_WIDTH = 200
"""Columns of a table that is not shown on a terminal."""
_GENERATED = re.compile("[0-9a-f]{16}")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def echo_json(value: Any) -> None:
    """Print the JSON value of a command with --json; ASCII, so that any pipe can take it."""
    click.echo(json.dumps(value))


def console(*, stderr: bool = False) -> Console:
    """A console that takes every text literally."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else PIPE_WIDTH
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False)


def progress_bar(
    columns: Sequence[Any] = (), *, quiet: bool = False
) -> AbstractContextManager[Lines | Progress]:
    """What a long command shows of its tasks on stderr: bars on a terminal, which disappear when they
    are done; elsewhere a line every ten seconds. quiet: nothing."""
    if quiet:
        return Lines(lambda line: None)
    if not sys.stderr.isatty():
        return Lines(lambda line: click.echo(line, err=True))
    return terminal_bar(columns, quiet=False)


def progress_lines(*, quiet: bool = False) -> Lines:
    """A line every ten seconds on stderr, also on a terminal: for a command that prints its results meanwhile,
    which a bar would get in the way of. quiet: nothing."""
    return Lines(lambda line: None if quiet else click.echo(line, err=True))


def terminal_bar(columns: Sequence[Any], *, quiet: bool) -> Progress:
    """Bars on stderr, if that is a terminal; they disappear when they are done."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, wraps: bool = False
) -> None:
    """Print a table, a line a row: on a narrow terminal, cells that are not numbers are cut, or `wraps`
    gives them more lines. Columns
    whose heading starts with '>' are right-aligned; those without any content are left out. All cells
    are cleaned (see `clean`)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    cells = [[clean(str(cell)) for cell in row] for row in rows]
    shown = [place for place in range(len(columns)) if any(row[place] for row in cells)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in (columns[place] for place in shown):
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"), justify="right" if right else "left", no_wrap=right
        )
    for row in cells:
        table.add_row(
            *(Text(row[place], no_wrap=not wraps, overflow="ellipsis") for place in shown)
        )
    console().print(table)


def show_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print lines of a name and its value."""
    pairs = [(name, clean(str(value))) for name, value in facts]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        click.echo(f"{name:<{width}}  {value}")


def clean(text: str, *, lines: bool = False) -> str:
    """Text without control characters, for a terminal; `lines` keeps line breaks."""
    kept = ("\n",) if lines else ()
    return "".join(
        c if c in kept or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else " "
        for c in text
    )


def preview(text: str, chars_max: int, *, end: bool = False) -> str:
    """One line of `text`: its beginning, or its end."""
    part = text[-4 * chars_max :] if end else text[: 4 * chars_max]
    line = " ".join(clean(part).split())
    if len(line) <= chars_max and len(part) == len(text):
        return line
    return "…" + line[-chars_max:].lstrip() if end else line[:chars_max].rstrip() + "…"


def size(n_bytes: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in _UNITS:
        if n_bytes < 1024 or unit == _UNITS[-1]:
            break
        n_bytes /= 1024
    return f"{n_bytes:.0f} {unit}" if unit == "B" or n_bytes >= 100 else f"{n_bytes:.1f} {unit}"


def layer_facts(footprint: dict[str, Any]) -> list[tuple[str, str]]:
    """What conversations take after each layer, a line each."""
    by_format = ", ".join(
        f"{each['format']} {size(each['bytes'])} ({each['tokens']:,} tokens)"
        for each in footprint["formats"]
    )
    kept = size(footprint["kept_bytes"])
    ratio = footprint["slot_bytes"] / footprint["kept_bytes"] if footprint["kept_bytes"] else 0
    return [
        ("a slot file each", f"{size(footprint['slot_bytes'])} of native rows"),
        ("shared prefixes", f"{size(footprint['shared_bytes'])}, every token once"),
        ("levels", f"{size(footprint['levels_bytes'])}, with rows in block formats"),
        ("transform", f"{size(footprint['transform_bytes'])}, with transform-coded rows"),
        (
            "kept",
            f"{kept}, 1/{ratio:,.1f}; {size(footprint['text_bytes'])} of it token ids and text",
        ),
        ("rows on disk", by_format or "none"),
    ]


def ago(unix_s: float) -> str:
    """The time since a moment, such as "5 min ago"."""
    return f"{duration(max(0.0, time.time() - unix_s))} ago"


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """By each generated session id, its shortest beginning that no other of `ids` has, of at least
    eight characters; towerctl takes it for the id. Names that clients gave are left as they are."""
    found = {}
    ordered = sorted(set(ids))
    for at, id in enumerate(ordered):
        beside = [*ordered[max(0, at - 1) : at], *ordered[at + 1 : at + 2]]
        n = max([8, *(1 + len(os.path.commonprefix([id, other])) for other in beside)])
        found[id] = id[:n] if _GENERATED.fullmatch(id) else id
    return found


def moment(unix_s: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def tiers(segment: dict[str, Any]) -> str:
    """The tiers of a segment's rows: RAM (hot), disk (warm), or neither ("tokens only")."""
    names = [name for name in ("hot", "warm") if segment[name]]
    return "+".join(names) or "tokens only"
