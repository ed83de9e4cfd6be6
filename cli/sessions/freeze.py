"""`towerctl freeze`, `towerctl thaw`: convert sessions to coded text and back; `towerctl recode`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta

import click

from towerd.cli.client.api_client import PAGE_MAX, ApiClient
from towerd.cli.client.target import Target, connect, json_option, setting_option, target_options
from towerd.cli.client.transport import Json
from towerd.errors import TowerdError

SCOPE_HELP = "Whose session, if several tenants have one of this name."
IDLE_S_MAX = 10**10
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
            self.fail(f"{value!r} is not a time such as 30m, 12h or 7d.", param, ctx)
        seconds = int(found[1]) * int(timedelta(**{UNITS[found[2] or "s"]: 1}).total_seconds())
        if seconds > IDLE_S_MAX:
            self.fail(f"{value!r} is longer than any session was unused.", param, ctx)
        return seconds


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
    from towerd.cli.output import progress_lines

    with connect(replace(target, model=model)) as backend, progress_lines(quiet=as_json) as lines:
        lines.add_task("freezing", total=None)
        if idle is not None:
            due = _idle(backend, idle, scope)
            found = _of_each(due, lambda name, of: _freeze(backend, name, of, as_json))
        else:
            found = [_freeze(backend, name, scope, as_json) for name in dict.fromkeys(names)]
    if as_json:
        from towerd.cli.output import echo_json

        echo_json({"frozen": found})
    elif not found:
        click.echo("No session was unused for that long.")


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
    from towerd.cli.output import echo_json, progress_lines

    thawed: list[Json] = []
    with connect(replace(target, model=model)) as backend, progress_lines(quiet=as_json) as lines:
        lines.add_task("thawing", total=None)
        for name in dict.fromkeys(names):
            found = backend.thaw_session(name, scope)
            thawed.append(found)
            if not as_json:
                n_tokens = found["session"]["n_tokens"]
                what = f"thawed, {n_tokens:,} tokens" if found["changed"] else "was not frozen"
                click.echo(f"Session {name}: {what}.")
    if as_json:
        echo_json({"thawed": thawed})


@click.command()
@click.argument("names", metavar="[SESSION]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that have a coded form.")
@click.option("--scope", metavar="TENANT", help="Only this tenant's.")
@setting_option("model")
@json_option
@target_options
def recode(
    names: tuple[str, ...],
    everything: bool,
    scope: str | None,
    model: str | None,
    as_json: bool,
    target: Target,
) -> None:
    """Code each SESSION again that is frozen, or has a copy in coded form, with the tables and models
    of this release. The new form is checked before it replaces the old one."""
    if bool(names) == everything:
        raise click.UsageError("Name sessions, or give --all.")
    from towerd.cli.output import progress_lines

    with connect(replace(target, model=model)) as backend, progress_lines(quiet=as_json) as lines:
        lines.add_task("coding again", total=None)
        if everything:
            coded = _coded(backend, scope)
            found = _of_each(coded, lambda name, of: _recode(backend, name, of, as_json))
        else:
            found = [_recode(backend, name, scope, as_json) for name in dict.fromkeys(names)]
    if as_json:
        from towerd.cli.output import echo_json

        echo_json({"recoded": found})
    elif not found:
        click.echo("No session has a coded form.")


def _recode(backend: ApiClient, name: str, scope: str | None, quiet: bool) -> Json:
    from towerd.cli.output import size

    found = backend.recode_session(name, scope)
    if not quiet:
        session = found["session"]
        what = f", {size(session['cold_bytes'])}" if session["cold_bytes"] else ""
        done = f"coded again{what}" if found["changed"] else "has no coded form"
        click.echo(f"Session {name}: {done}.")
    return found


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


def _of_each(sessions: Iterable[Json], work: Callable[[str, str], Json]) -> list[Json]:
    """`work(id, scope)` of each session. A failure is reported, and the others continue; the same
    failure twice in a row is not about a single session, and is raised."""
    done: list[Json] = []
    before = ""
    for session in sessions:
        try:
            done.append(work(session["id"], session["scope"]))
        except TowerdError as error:
            if error.message == before:
                raise
            before = error.message
            click.echo(f"Session {session['id']}: {error.message}", err=True)
    return done


def _coded(backend: ApiClient, scope: str | None) -> Iterator[Json]:
    """Every session that has a coded form, page by page."""
    after = 0
    while page := backend.coded_sessions(after, PAGE_MAX, scope):
        yield from page
        after = page[-1]["pk"]


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
