"""`towerctl gc`: remove what nothing needs."""

from __future__ import annotations

import click

from towerd.cli.client.target import Target, connect, json_option, target_options


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option(
    "--quarantine-days",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Keep damaged files in quarantine for this many days.",
)
@json_option
@target_options
def gc(dry_run: bool, quarantine_days: float, as_json: bool, target: Target) -> None:
    """Remove segments that no session, base or pin needs, and the files they leave behind."""
    from towerd.cli.output import echo_json, progress_bar, size

    with connect(target) as backend, progress_bar(quiet=as_json) as bar:
        bar.add_task("looking for what nothing needs", total=None)
        report = backend.gc(quarantine_days, dry_run)
    if as_json:
        echo_json({"dry_run": dry_run, **report})
        return
    what = f"{report['segments']:,} segments and {report['files']:,} files"
    freed = size(report["bytes_freed"])
    if dry_run:
        click.echo(f"Would remove {what} and free {freed}; nothing was changed.")
    else:
        click.echo(f"Removed {what}; {freed} freed.")
