"""`towerctl freeze`, `towerctl thaw`: convert sessions to coded text and back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import click

from towerd.cli.client.api_client import PAGE_MAX, ApiClient, Json
from towerd.cli.client.target import Target, connect, json_option, setting_option, target_options
from towerd.errors import TowerdError

SCOPE_HELP = "Whose, if several tenants have one of this name."
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Age(click.ParamType[int]):
    """A time such as 90s, 30m, 12h, 7d or 2w; a bare number is seconds."""

    name = "age"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d{1,9})([smhdw]?)", str(value))
        if found is None:
            self.fail(f"{value!r} is no time such as 30m, 12h or 7d.", param, ctx)
        return int(timedelta(**{UNITS[found[2] or "s"]: int(found[1])}).total_seconds())


@click.command()
@click.argument("names", metavar="[SESSION]...", nargs=-1)
@click.option(
    "--idle",
    type=Age(),
    metavar="AGE",
    help="All sessions that were unused for this long, such as 30m, 12h or 7d.",
)
@click.option("--scope", metavar="TENANT", help="Only this tenant's.")
@setting_option("model")
@json_option
@target_options
def freeze(
    names: tuple[str, ...],
    idle: int | None,
    scope: str | None,
    model: str | None,
    as_json: bool,
    target: Target,
) -> None:
    """Keep each SESSION as coded text: some kilobytes, without rows. It stays listed, and thaws by
    itself when it is continued."""
    if bool(names) == (idle is not None):
        raise click.UsageError("Name sessions, or give --idle.")
    with connect(replace(target, model=model)) as backend:
        if idle is not None:
            found = _freeze_idle(backend, idle, scope, as_json)
        else:
            found = [_freeze(backend, name, scope, as_json) for name in dict.fromkeys(names)]
    if as_json:
        from towerd.cli.output import echo_json

        echo_json({"frozen": found})
    elif not found:
        click.echo("No session was unused for so long.")


@click.command()
@click.argument("names", metavar="SESSION...", nargs=-1, required=True)
@click.option("--scope", metavar="TENANT", help=SCOPE_HELP)
@setting_option("model")
@json_option
@target_options
def thaw(
    names: tuple[str, ...], scope: str | None, model: str | None, as_json: bool, target: Target
) -> None:
    """Restore the tokens of each frozen SESSION. A daemon evaluates its rows in idle time."""
    from towerd.cli.output import echo_json

    thawed: list[Json] = []
    with connect(replace(target, model=model)) as backend:
        for name in dict.fromkeys(names):
            found = backend.thaw_session(name, scope)
            thawed.append(found)
            if not as_json:
                n_tokens = found["session"]["n_tokens"]
                what = f"thawed, {n_tokens:,} tokens" if found["changed"] else "was not frozen"
                click.echo(f"Session {name}: {what}.")
    if as_json:
        echo_json({"thawed": thawed})


def _freeze(backend: ApiClient, name: str, scope: str | None, quiet: bool) -> Json:
    from towerd.cli.output import size

    found = backend.freeze_session(name, scope)
    if not quiet:
        session = found["session"]
        what = (
            f"frozen, {session['n_tokens']:,} tokens in {size(session['cold_bytes'])}"
            if found["changed"]
            else "is frozen already"
        )
        click.echo(f"Session {name}: {what}.")
    return found


def _freeze_idle(backend: ApiClient, idle_s: int, scope: str | None, quiet: bool) -> list[Json]:
    """Freeze all idle sessions. A failure is reported, and the others continue; the same failure
    twice in a row is not about a single session, and is raised."""
    done: list[Json] = []
    before = ""
    for session in _idle(backend, idle_s, scope):
        try:
            done.append(_freeze(backend, session["id"], session["scope"], quiet))
        except TowerdError as error:
            if error.message == before:
                raise
            before = error.message
            click.echo(f"Session {session['id']}: {error.message}", err=True)
    return done


def _idle(backend: ApiClient, idle_s: int, scope: str | None) -> Iterator[Json]:
    """Every idle session once, page by page: frozen ones are not listed again."""
    seen: set[tuple[str, str]] = set()
    while True:
        page = backend.idle_sessions(idle_s, PAGE_MAX, scope)
        new = [each for each in page if (each["scope"], each["id"]) not in seen]
        if not new:
            return
        seen.update((each["scope"], each["id"]) for each in new)
        yield from new
