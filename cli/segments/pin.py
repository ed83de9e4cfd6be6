"""`towerctl pin`, `towerctl unpin`: keep segments from eviction and gc."""

from __future__ import annotations

import click

from towerd.cli.client.api_client import ApiClient
from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.cli.sessions.sessions import leaf_segment
from towerd.errors import ConfigError, NotFound, SessionFrozen

SEGMENT = click.IntRange(1, 2**62)
SESSION_HELP = "The segment at which this session's current branch ends."


@click.command()
@click.argument("segment", type=SEGMENT, required=False)
@click.option("--session", metavar="SESSION", help=SESSION_HELP)
@json_option
@target_options
def pin(segment: int | None, session: str | None, as_json: bool, target: Target) -> None:
    """Keep SEGMENT and its ancestors from eviction and gc. Without an argument, list the pinned
    segments and the precached bases."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        if segment is None and session is None:
            _list(backend, as_json)
            return
        pinned = backend.pin(_segment(backend, segment, session))
    if as_json:
        echo_json({"pinned": pinned})
    else:
        click.echo(f"Pinned segment {pinned['id']} and its ancestors.")


@click.command()
@click.argument("segment", type=SEGMENT, required=False)
@click.option("--session", metavar="SESSION", help=SESSION_HELP)
@click.option("--base", metavar="NAME", help="Forget this precached base and its pin.")
@click.option(
    "--scope", metavar="TENANT", help="Whose base, if there is a public and another of this name."
)
@json_option
@target_options
def unpin(
    segment: int | None,
    session: str | None,
    base: str | None,
    scope: str | None,
    as_json: bool,
    target: Target,
) -> None:
    """Undo pin for SEGMENT, or forget a base."""
    from towerd.cli.output import echo_json

    if base is not None and (segment is not None or session is not None):
        raise ConfigError("Give a segment, --session or --base, not several.")
    with connect(target) as backend:
        if base is None:
            id = _segment(backend, segment, session)
            backend.unpin(id)
            said, value = f"Unpinned segment {id}.", {"unpinned": id, "base": None}
        else:
            found = _base(backend, base, scope)
            backend.remove_base(found["name"], found["scope"])
            said = f"Forgot the base {base}; towerctl gc frees what nothing else needs."
            value = {"unpinned": found["segment"], "base": found["name"]}
    if as_json:
        echo_json(value)
    else:
        click.echo(said)


def _segment(backend: ApiClient, segment: int | None, session: str | None) -> int:
    if (segment is None) == (session is None):
        raise ConfigError("Give either a segment or --session.")
    if segment is not None:
        return segment
    assert session is not None
    found = backend.session(session)
    if found["session"]["cold_bytes"]:
        raise SessionFrozen(f"The session {session!r} is frozen: thaw it with towerctl thaw first.")
    leaf = leaf_segment(found["turns"])
    if leaf == 0:
        raise NotFound(f"The session {session!r} has no stored tokens yet.")
    return leaf


def _base(backend: ApiClient, name: str, scope: str | None) -> Json:
    found = [
        base for base in backend.bases() if base["name"] == name and scope in (None, base["scope"])
    ]
    if not found:
        raise NotFound(f"There is no base {name!r}: towerctl pin lists them.")
    if len(found) > 1:
        scopes = ", ".join(base["scope"] for base in found)
        raise ConfigError(f"Several tenants have a base {name!r}: add --scope, one of {scopes}.")
    return found[0]


def _list(backend: ApiClient, as_json: bool) -> None:
    from towerd.cli.output import echo_json, show_table, size, tiers

    pins, bases = backend.pins(), backend.bases()
    if as_json:
        echo_json({"pins": pins, "bases": bases})
        return
    if pins:
        show_table(
            (">SEGMENT", "TENANT", ">TOKENS", "ROWS", ">BYTES"),
            [
                (each["id"], each["scope"], f"{each['tokens']:,}", tiers(each), size(each["bytes"]))
                for each in pins
            ],
        )
    if bases:
        show_table(
            ("BASE", ">LEVEL", "TENANT", ">TOKENS", ">SEGMENT"),
            [
                (each["name"], each["level"], each["scope"], f"{each['tokens']:,}", each["segment"])
                for each in bases
            ],
        )
    if not pins and not bases:
        click.echo("Nothing is pinned.")
