"""`towerctl shared`: sessions and bases to the shared tier and from it, and what is deleted there."""

from __future__ import annotations

import click

from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.errors import ConfigError

TITLE_CHARS = 60
BASE_HELP = "A precached base instead of a session."


def _days(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """30d -> 30.0."""
    try:
        return None if value is None else float(value.removesuffix("d"))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no number of days, such as 30d.") from None


@click.group()
def shared() -> None:
    """Share conversations and precached bases with other machines, through the daemon's --shared store."""


@shared.command()
@click.argument("session", required=False)
@click.option("--base", metavar="NAME", help=BASE_HELP)
@click.option("--scope", metavar="TENANT", help="Whose, if several tenants have one of this name.")
@json_option
@target_options
def push(
    session: str | None, base: str | None, scope: str | None, as_json: bool, target: Target
) -> None:
    """Put SESSION with all its turns, and the state that the disk has of it, into the shared store."""
    what = _what(session, base, scope)
    with connect(target) as backend:
        if session is not None:
            what["session"] = backend.whole_id(session, scope)
        found = backend.shared("push", what)
    _say(found, "Put", "in the shared store", what, as_json)


@shared.command()
@click.argument("session", required=False)
@click.option("--base", metavar="NAME", help=BASE_HELP)
@click.option(
    "--replace", is_flag=True, help="Replace a base of this name here that has another text."
)
@click.option("--scope", metavar="TENANT", help="For this tenant, who must also own it there.")
@json_option
@target_options
def pull(
    session: str | None,
    base: str | None,
    replace: bool,
    scope: str | None,
    as_json: bool,
    target: Target,
) -> None:
    """Take SESSION, by its whole id, from the shared store: it continues here as it would have there."""
    what = _what(session, base, scope)
    if replace and base is None:
        raise ConfigError("--replace is for --base.")
    what |= {"replace": True} if replace else {}
    with connect(target) as backend:
        found = backend.shared("pull", what)
    _say(found, "Took", "here", what, as_json)


@shared.command()
@click.argument("session", required=False)
@click.option("--base", metavar="NAME", help=BASE_HELP)
@click.option("--scope", metavar="TENANT", help="Whose it is there.")
@json_option
@target_options
def rm(
    session: str | None, base: str | None, scope: str | None, as_json: bool, target: Target
) -> None:
    """Delete SESSION, by its whole id, from the shared store; what is here stays."""
    from towerd.cli.output import clean, echo_json

    what = _what(session, base, scope)
    with connect(target) as backend:
        found = backend.shared_rm(what)
    kind = "session" if "session" in what else "base"
    if as_json:
        echo_json(found)
        return
    name = f"{kind} {clean(what[kind])}"
    if found["records"]:
        click.echo(f"Deleted {name} from the shared store; towerctl shared gc frees the space.")
    else:
        click.echo(f"The shared store has no {name}.")
    if found["puts_again"]:
        why, undo = "it is pinned here", "towerctl unpin with a segment that towerctl pin lists"
        if kind == "base":
            why, undo = "it is a base here", f"towerctl unpin --{name}"
        click.echo(
            f"This daemon puts it there again within the hour, since {why}: {undo} ends that."
        )


@shared.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option(
    "--older-than",
    metavar="DAYS",
    callback=_days,
    help="Also what no daemon has put for this long, such as 30d.",
)
@json_option
@target_options
def gc(dry_run: bool, older_than: float | None, as_json: bool, target: Target) -> None:
    """Delete from the shared store what nothing needs. One run lists it, and a run an hour or
    more later deletes it."""
    from towerd.cli.output import clean, echo_json, size

    with connect(target) as backend:
        found = backend.shared_gc(older_than, dry_run)
    if as_json:
        echo_json({"dry_run": dry_run, **found})
        return
    waiting, n_bytes = _count(found["waiting_objects"], "object"), size(found["waiting_bytes"])
    are, them = ("is", "it") if found["waiting_objects"] == 1 else ("are", "them")
    if dry_run:
        records = _count(found["records"], "record")
        click.echo(
            f"{records} would be deleted; {waiting} ({n_bytes}) {are} garbage. Nothing was changed."
        )
        return
    click.echo(f"Deleted {_count(found['objects'], 'object')} ({size(found['bytes'])}).")
    if found["waiting_objects"]:
        click.echo(f"{waiting} ({n_bytes}) {are} garbage; a gc in an hour or later deletes {them}.")
    for place in found["passed_over"]:
        click.echo(f"{clean(place)} cannot be read, and was passed over; it deletes nothing.")


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


@shared.command(name="list")
@click.option("--scope", metavar="TENANT", help="What this tenant can pull.")
@json_option
@target_options
def list_(scope: str | None, as_json: bool, target: Target) -> None:
    """List the sessions and bases that can be pulled from the shared store."""
    from towerd.cli.output import ago, echo_json, preview, show_table

    with connect(target) as backend:
        found = backend.shared_listing(scope)
    if as_json:
        echo_json(found)
        return
    if not found["sessions"] and not found["bases"]:
        click.echo("Nothing is there for this tenant and key.")
        return
    sessions = [
        ("session", each["id"], each["turns"], *_sizes(each), ago(each["put"]), each["title"])
        for each in found["sessions"]
    ]
    bases = [
        ("base", each["name"], "", *_sizes(each), ago(each["put"]), "") for each in found["bases"]
    ]
    rows = [(*cells, preview(title, TITLE_CHARS)) for *cells, title in sessions + bases]
    show_table(("kind", "name", ">turns", ">tokens", ">with state", "put", "title"), rows)


def _sizes(each: Json) -> tuple[str, str]:
    tokens, rows = each["tokens"], each["rows"]
    return f"{tokens:,}", f"{min(tokens, rows):,}"


def _what(session: str | None, base: str | None, scope: str | None) -> Json:
    """What is asked of the daemon. Raises ConfigError."""
    if (session is None) == (base is None):
        raise ConfigError("Give either a session or --base.")
    what = {"session": session} if base is None else {"base": base}
    return what | ({} if scope is None else {"scope": scope})


def _say(found: Json, verb: str, where: str, what: Json, as_json: bool) -> None:
    from towerd.cli.output import clean, echo_json

    if as_json:
        echo_json(found)
        return
    kind = "session" if "session" in what else "base"
    tokens, rows = found["tokens"], found["rows"]
    of_rows = f"{rows:,} of its {tokens:,} tokens have their state {where}"
    branch = ""
    if found.get("branched"):
        added = found["added"]
        were, are = ("turn was", "is a branch") if added == 1 else ("turns were", "are branches")
        branch = f"; {added:,} {were} not here, and {are} beside the current one"
    click.echo(f"{verb} {kind} {clean(what[kind])}; {of_rows}{branch}.")
