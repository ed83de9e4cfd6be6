"""`towerctl trie`: draw the prefix tree of stored segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from towerd.cli.client.api_client import PAGE_MAX, ApiClient
from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json

if TYPE_CHECKING:
    from rich.text import Text

DEPTH_MAX = 200
PREVIEW_CHARS = 50


@click.command()
@click.option("--root", type=click.IntRange(0, 2**62), default=0, help="Only below this segment.")
@click.option(
    "--depth", type=click.IntRange(1, DEPTH_MAX), default=12, show_default=True, help="Levels."
)
@click.option(
    "--limit",
    type=click.IntRange(1, PAGE_MAX),
    default=200,
    show_default=True,
    help="Segments, upper levels first.",
)
@click.option("--scope", metavar="TENANT", help="Only this tenant's and the public ones.")
@click.option(
    "--text/--no-text",
    default=None,
    help="Whether to show how each run begins. [default: if the daemon runs, but not with --json]",
)
@json_option
@target_options
def trie(
    root: int,
    depth: int,
    limit: int,
    scope: str | None,
    text: bool | None,
    as_json: bool,
    target: Target,
) -> None:
    """Draw the tree of stored segments: a shared prefix is stored once, however many sessions begin
    with it."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        found = backend.tree(root, depth, limit, scope)
        if text is None:
            text = backend.has_model and not as_json
        if text:
            _add_text(backend, found)
        if as_json:
            echo_json(found)
        else:
            _draw(backend, found)


def _entries(found: Json) -> list[Json]:
    """Every segment of the answer."""
    entries, stack = [], list(found["trie"])
    while stack:
        entries.append(stack.pop())
        stack += entries[-1]["children"]
    return entries


def _add_text(backend: ApiClient, found: Json) -> None:
    for entry in _entries(found):
        entry["text"] = backend.segment(entry["id"], text=True)["text"]


def _draw(backend: ApiClient, found: Json) -> None:
    from rich.tree import Tree

    from towerd.cli.output import console

    if not found["trie"]:
        click.echo("Nothing is stored here yet.")
        return
    entries = _entries(found)
    tokens = sum(entry["tokens"] for entry in entries)
    name = f"segment {found['root']}" if found["root"] else backend.where
    tree = Tree(f"{name}: {len(entries):,} segments, {tokens:,} tokens")
    stack = [(tree, found["trie"])]
    while stack:
        parent, children = stack.pop()
        for entry in children:
            stack.append((parent.add(_label(entry)), entry["children"]))
    console().print(tree, soft_wrap=True)
    if found["truncated"]:
        click.echo("There is more: --limit, --depth and --root show other parts.")


def _label(entry: Json) -> Text:
    from rich.text import Text

    from towerd.cli.output import clean, preview, size, tiers

    rows = tiers(entry)
    label = Text(f"#{entry['id']}", style="bold")
    label.append(f" {entry['tokens']:,} tokens", style="not bold")
    label.append(f" [{entry['p0']:,}, {entry['p1']:,})", style="dim not bold")
    style = "not bold yellow" if rows == "tokens only" else "not bold green"
    held = f" {rows}" if rows == "tokens only" else f" {rows} {size(entry['bytes'])}"
    label.append(held, style=style)
    if entry["pinned"]:
        label.append(" pinned", style="not bold magenta")
    if entry["scope"] != "local":
        label.append(f" {clean(entry['scope'])}", style="not bold cyan")
    if "text" in entry:
        label.append(f" “{preview(entry['text'], PREVIEW_CHARS)}”", style="not bold italic")
    return label
