"""`towerctl verify`: check every stored byte against its checksum."""

from __future__ import annotations

import click

from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json


@click.command()
@click.option(
    "--repair",
    is_flag=True,
    help="Quarantine damaged files now; rebuild a damaged catalog or journal from the other.",
)
@json_option
@target_options
def verify(repair: bool, as_json: bool, target: Target) -> None:
    """Check every file with rows or a state checkpoint, every frozen session, and the catalog's
    pages, indexes and rows against their checksums, and catalog, journal and prefix tree against each
    other. Exit code 1 if anything is damaged."""
    from rich.progress import DownloadColumn

    from towerd.cli.output import echo_json, progress_bar

    with connect(target) as backend:
        columns = (DownloadColumn(binary_units=True),)
        with progress_bar(columns, quiet=as_json) as bar:
            task = bar.add_task("verifying", total=None)
            report = backend.verify(
                repair, lambda done, total: bar.update(task, completed=done, total=total)
            )
    if as_json:
        echo_json(report)
    else:
        _print(report)
    if not report["ok"]:
        raise SystemExit(1)


def _print(report: Json) -> None:
    from towerd.cli.output import clean, size

    click.echo(
        f"Read {report['files']:,} files ({size(report['bytes_read'])}); checked "
        f"{report['segments']:,} segments and {report['sessions']:,} sessions, "
        f"{report['frozen_sessions']:,} of them frozen."
    )
    for note in report["recovered"]:
        click.echo(f"Recovered: {clean(str(note))}")
    if report["orphans"]:
        click.echo(
            f"{report['orphans']:,} files are left over from a crash; towerctl gc removes them."
        )
    if report["ok"]:
        click.echo("All is well.")
        return
    for problem in report["problems"]:
        click.echo(f"- {clean(str(problem))}")
    if report["quarantined"]:
        click.echo(
            f"{report['quarantined']:,} damaged files were moved to the store's quarantine folder, "
            "where gc deletes them after 30 days."
        )
    click.echo(
        "No conversation is lost: tokens whose rows are damaged are evaluated again when they are "
        "needed, and the catalog and its journal are rebuilt from each other. That happens "
        "on the next use or at the next start, or at once with --repair."
    )
