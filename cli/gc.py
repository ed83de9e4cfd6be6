"""`towerctl gc`: remove what nothing needs."""

from __future__ import annotations

from collections.abc import Iterator

import click

from towerd.cli.client import PAGE_MAX, Backend, Json, Target, connect, json_option, target_options
from towerd.errors import NotSupported


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--quarantine-days",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Keep damaged files in quarantine for so long.",
)
@json_option
@target_options
def gc(dry_run: bool, quarantine_days: float, as_json: bool, target: Target) -> None:
    """Remove segments that no session, base or pin needs, and the files they leave behind."""
    from towerd.cli.output import echo_json, size

    with connect(target) as backend:
        report = would_go(backend) if dry_run else backend.gc(quarantine_days)
    if as_json:
        echo_json({"dry_run": dry_run, **report})
    elif dry_run:
        click.echo(
            f"Would remove {report['segments']:,} segments with {size(report['bytes_freed'])} of "
            "rows on disk; nothing was changed."
        )
    else:
        click.echo(
            f"Removed {report['segments']:,} segments and {report['files']:,} files; "
            f"{size(report['bytes_freed'])} freed."
        )


def would_go(backend: Backend) -> Json:
    """What gc would remove, counted from outside: `segments`, `bytes_freed` (of their rows; a
    file that a needed segment shares would stay) and `files`, which is unknown (None)."""
    segments = {each["id"]: each for each in _all_segments(backend)}
    needed = _needed(backend)
    for id in list(needed):
        while id in segments and (id := segments[id]["parent"]) not in needed:
            needed.add(id)
    doomed = [each for id, each in segments.items() if id not in needed]
    freed = sum(each["bytes"] for each in doomed if each["warm"])
    return {"segments": len(doomed), "files": None, "bytes_freed": freed}


def _all_segments(backend: Backend) -> Iterator[Json]:
    offset, total = 0, 1
    while offset < total:
        page = backend.segments("id", PAGE_MAX, offset)
        yield from page["segments"]
        offset, total = offset + PAGE_MAX, page["total"]


def _needed(backend: Backend) -> set[int]:
    """The segments that turns, pins and bases name."""
    sessions = backend.sessions(PAGE_MAX)
    if len(sessions) == PAGE_MAX and backend.stats()["store"]["sessions"] > PAGE_MAX:
        raise NotSupported(
            f"A dry run looks through at most {PAGE_MAX:,} sessions: run gc without --dry-run; it "
            "never removes what a session, a base or a pin needs."
        )
    needed = {pin["id"] for pin in backend.pins()} | {base["segment"] for base in backend.bases()}
    for session in sessions:
        for turn in backend.session(session["id"], session["scope"])["turns"]:
            needed |= {turn["prompt_node"], turn["reply_node"]}
    return needed
