"""`towerctl segments`: the stored runs of tokens, one by one."""

from __future__ import annotations

import click

from towerd.cli.client.api_client import PAGE_MAX
from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.settings.setting import LOCAL_TENANT

_CUTS = {
    "anywhere": "cut at any token",
    "boundary": "only where a segment ends with a state checkpoint",
    "whole": "only where a segment ends with a state checkpoint, which is the whole state",
}
"""How a segment can be reused, by kind of model."""


@click.group()
def segments() -> None:
    """List and show segments: the stored runs of tokens."""


@segments.command()
@click.option(
    "--limit",
    type=click.IntRange(1, PAGE_MAX),
    default=50,
    show_default=True,
    help="Show at most this many.",
)
@click.option("--offset", type=click.IntRange(0, 2**31), default=0, help="Skip this many.")
@click.option(
    "--sort",
    type=click.Choice(["used", "tokens", "hits", "id"]),
    default="used",
    show_default=True,
    help="Order; all but id begin with the largest.",
)
@click.option("--scope", metavar="TENANT", help="Only this tenant's and the public ones.")
@json_option
@target_options
def ls(
    limit: int, offset: int, sort: str, scope: str | None, as_json: bool, target: Target
) -> None:
    """List segments, the last used first."""
    from towerd.cli.output import echo_json, show_table

    with connect(target) as backend:
        found = backend.segments(sort, limit, offset, scope)
    if as_json:
        echo_json(found)
        return
    if not found["segments"]:
        click.echo("No segments here.")
        return
    columns = (
        ">SEGMENT",
        ">AFTER",
        "TENANT",
        "TOKENS",
        "ROWS",
        "FORMAT",
        ">BYTES",
        ">HITS",
        ">LAST USED",
        "PINNED",
    )
    show_table(columns, [_row(each) for each in found["segments"]])
    if found["total"] > len(found["segments"]):
        click.echo(f"{len(found['segments'])} of {found['total']:,} segments.")


def _row(segment: Json) -> tuple[object, ...]:
    from towerd.cli.output import ago, size, tiers

    return (
        segment["id"],
        segment["parent"] or "-",
        "" if segment["scope"] == LOCAL_TENANT else segment["scope"],
        f"[{segment['p0']:,}, {segment['p1']:,})",
        tiers(segment),
        segment["format"] or "-",
        size(segment["bytes"]),
        "-" if segment["hits"] is None else segment["hits"],
        "-" if segment["last_used"] is None else ago(segment["last_used"]),
        "pinned" if segment["pinned"] else "",
    )


@segments.command()
@click.argument("segment", type=click.IntRange(1, 2**62))
@click.option("--text", is_flag=True, help="Its whole text; needs the daemon.")
@click.option("--ids", is_flag=True, help="Its token ids.")
@json_option
@target_options
def show(segment: int, text: bool, ids: bool, as_json: bool, target: Target) -> None:
    """Show SEGMENT: its place in the prefix tree, its rows, its text."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        with_text = text or (backend.has_model and not as_json)
        found = backend.segment(segment, text=with_text, ids=ids)
    if as_json:
        echo_json({"text": None, "ids": None, **found})
    else:
        _print(found, whole_text=text)


def _print(found: Json, *, whole_text: bool) -> None:
    from towerd.cli.output import clean, moment, preview, show_facts, size, tiers

    children = ", ".join(map(str, found["children"])) or "-"
    facts: list[tuple[str, object]] = [
        ("segment", found["id"]),
        ("path", " > ".join(map(str, found["path"]))),
        ("children", children),
        ("tenant", found["scope"]),
        ("tokens", f"[{found['p0']:,}, {found['p1']:,}), {found['tokens']:,} in all"),
        ("rows", f"{tiers(found)}, {size(found['bytes'])}"),
        ("format", found["format"] or "-"),
        ("reuse", _CUTS[found["cut"]]),
        ("state checkpoint", size(found["checkpoint_bytes"]) if found["checkpoint_bytes"] else "-"),
        ("pinned", "yes" if found["pinned"] else "no"),
    ]
    if found["hits"] is not None:
        facts += [("hits", found["hits"]), ("last used", moment(found["last_used"]))]
    if "ids" in found:
        facts.append(("ids", " ".join(map(str, found["ids"]))))
    if "text" in found and not whole_text:
        facts.append(("text", preview(found["text"], 300)))
    show_facts(facts)
    if "text" in found and whole_text:
        click.echo(clean(found["text"], lines=True))
