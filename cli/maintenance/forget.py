"""`towerctl forget`: delete conversations, and destroy what is needed to read them."""

from __future__ import annotations

import click

from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json


def _days(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """30d -> 30.0."""
    try:
        found = None if value is None else float(value.removesuffix("d"))
    except ValueError:
        found = -1.0
    if found is not None and not 0 <= found < 1e6:
        raise click.BadParameter(f"{value!r} is no number of days, such as 30d.")
    return found


@click.command()
@click.argument("names", metavar="[SESSION]...", nargs=-1)
@click.option(
    "--older-than",
    callback=_days,
    metavar="DAYS",
    help="Those unused for so long, such as 90d, but not pinned ones.",
)
@click.option(
    "--tenant",
    help="All that this tenant has; with --older-than, of that what is unused for so long.",
)
@click.option(
    "--scope", metavar="TENANT", help="Whose SESSION is, if several tenants have one of this name."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@target_options
def forget(
    names: tuple[str, ...],
    older_than: float | None,
    tenant: str | None,
    scope: str | None,
    yes: bool,
    as_json: bool,
    target: Target,
) -> None:
    """Delete conversations for good: each SESSION, those unused for long, or all of a tenant.

    What only they had is deleted and overwritten, in the journal, the index of words and the files of attention state, too. The
    keys of an encrypted store are made anew and the earlier ones destroyed, so that nothing of it can be read even from
    blocks that the disk has kept. Without any of them, this is done for what was deleted before."""
    from towerd.cli.output import echo_json, progress_bar

    if tenant == "":
        raise click.UsageError("--tenant needs a name.")
    if names and (older_than is not None or tenant is not None):
        raise click.UsageError("Name sessions, or give --older-than or --tenant.")
    with connect(target) as backend:
        asked = (backend.session(name, scope)["session"] for name in names)
        named = list({(each["scope"], each["id"]): each for each in asked}.values())
        of = [{key: each[key] for key in ("id", "scope", "tokenizer")} for each in named]
        chosen = {"sessions": of, "older_than_days": older_than, "tenant": tenant}
        said = backend.would_forget(chosen)
        n_tokens = sum(each["n_tokens"] for each in named) or said["tokens"]
        if not yes:
            is_chosen = names or tenant or older_than is not None
            what = f"{_what(said)} with {n_tokens:,} tokens" if is_chosen else "what was deleted"
            click.confirm(f"Forget {what} for good?", abort=True, err=True)
        with progress_bar(quiet=as_json) as bar:
            bar.add_task("forgetting", total=None)
            found = backend.forget(chosen)
    found["tokens"] = n_tokens
    if as_json:
        echo_json(found)
    else:
        _say(found)


def _say(found: Json) -> None:
    from towerd.cli.output import size

    what = _what(found, "conversations", "responses", "bases", "pins", "workflows")
    click.echo(f"Forgot {what}; {size(found['bytes_freed'])} freed.")
    if found["keys_destroyed"]:
        click.echo("The keys that they were encrypted with are destroyed; what stays has new ones.")
    else:
        click.echo(
            "The store is not encrypted: blocks that the disk has not used again may still hold their words."
        )
    if found["held"]:
        click.echo(
            "Replies that are being generated still need some of it: run towerctl forget again."
        )
    click.echo("Tokens that other sessions also begin with stay theirs.")
    if found.get("shared"):
        click.echo("What was put into the shared store stays there: towerctl shared rm deletes it.")


def _what(found: Json, *names: str) -> str:
    """How much of each kind there is, sessions first."""
    n = found["sessions"]
    also = [
        f"{found[each]:,} {each}"
        for each in names or ("conversations", "responses")
        if found.get(each)
    ]
    return ", ".join([f"{n:,} session{'' if n == 1 else 's'}", *also])
