"""`towerctl search`: find what was said."""

from __future__ import annotations

import click

from towerd.cli.client.api_client import PAGE_MAX
from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.cli.sessions.sessions import SCOPE_HELP


@click.command()
@click.argument("words", nargs=-1, required=True)
@click.option(
    "--limit",
    type=click.IntRange(1, PAGE_MAX),
    default=20,
    show_default=True,
    help="Show at most this many.",
)
@click.option("--scope", metavar="TENANT", help=SCOPE_HELP)
@json_option
@target_options
def search(
    words: tuple[str, ...], limit: int, scope: str | None, as_json: bool, target: Target
) -> None:
    """Find the conversations in which all WORDS were said in one turn, including frozen ones."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        found = backend.search(" ".join(words), limit, scope)
    if as_json:
        echo_json(found)
    elif not found["results"]:
        click.echo("Nothing was found.")
    for result in () if as_json else found["results"]:
        _print(result)


def _print(result: Json) -> None:
    from towerd.cli.output import ago, clean

    session = result["session"]
    title = clean(session["title"]) or "(untitled)"
    click.echo(f"{click.style(clean(session['id']), bold=True)}  {title}  {ago(result['said'])}")
    runs = [" ".join(clean(run, lines=True).split("\n")) for run in result["snippet"]]
    shown = (click.style(run, fg="yellow") if i % 2 else run for i, run in enumerate(runs))
    click.echo(f"    {''.join(shown)}")
