"""`towerctl doctor`: check the installation, and say what to do about problems."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.client.target import Target, config_option, json_option, setting_option

if TYPE_CHECKING:
    from towerd.cli.doctor.check import Check, Finding

STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


@click.command()
@click.option("--load", is_flag=True, help="Also load the model and prove the state format on it.")
@setting_option("model")
@setting_option("store_dir")
@setting_option("socket")
@config_option
@json_option
def doctor(load: bool, as_json: bool, config_path: Path | None, **flags: Any) -> None:
    """Check the machine, the build, the model and the store, and say what to do.

    Exit code 1 if something FAILs.
    """
    from towerd import log
    from towerd.cli.output import echo_json

    config = Target(config_path=config_path).config(**flags)
    log.configure("error", config.log_format)
    results = []
    for check in _checks(load):
        finding = check.run(config)
        results.append((check, finding))
        if not as_json:
            _print(check, finding)
    failed = sum(finding.status == "FAIL" for _, finding in results)
    if as_json:
        checks = [{"group": c.group, "name": c.name, **asdict(f)} for c, f in results]
        echo_json({"ok": failed == 0, "checks": checks})
    else:
        warned = sum(finding.status == "WARN" for _, finding in results)
        click.echo(f"{len(results)} checks: {failed} failed, {warned} with a warning.")
    if failed:
        raise SystemExit(1)


def _checks(load: bool) -> list[Check]:
    from towerd.cli.doctor import build, machine, model, store

    loads = (model.LOADS,) if load else ()
    return [*machine.CHECKS, *build.CHECKS, *model.CHECKS, *loads, *store.CHECKS]


def _print(check: Check, finding: Finding) -> None:
    from rich.text import Text

    from towerd.cli.output import clean, console

    line = Text(f"{finding.status:<4}", style=STYLES[finding.status])
    line.append(f"  {check.group + ' ' + check.name:<20}  {clean(finding.found)}", style="not bold")
    if finding.advice:
        line.append(f"\n      -> {clean(finding.advice)}", style="not bold default")
    console().print(line, soft_wrap=True)
