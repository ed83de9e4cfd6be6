"""`towerctl calibrate`: measure which stored formats the model tolerates, or show the result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.client.target import (
    Target,
    connect,
    daemon_for,
    json_option,
    setting_option,
    target_options,
)
from towerd.cli.client.transport import Json
from towerd.errors import TowerdError

if TYPE_CHECKING:
    from towerd.cli.client.api_client import ApiClient

POLL_S = 0.3
LEGEND = (
    "Level 0 is what most conversations begin with, level 2 and deeper what few or one have. Drift",
    "is the mean KL divergence (nats) of the next-token distribution; its excess over the noise",
    "floor, up to the end of its 95 % interval, stays within the bound. Bits are per stored value.",
)


@click.command()
@click.option(
    "--fidelity", type=click.Choice(["near", "small"]), help="Show the table of this one only."
)
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
@click.option(
    "--package",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Write the table into this folder, as towerd/data/calibrations has it.",
)
@setting_option("model")
@json_option
@target_options
def calibrate(
    fidelity: str | None,
    again: bool,
    package: Path | None,
    as_json: bool,
    target: Target,
    model: str | None,
) -> None:
    """Measure what stored formats cost the model, or show what was measured.

    The daemon calibrates by itself in idle time; this command makes it start now, in small steps
    between requests. Without a running daemon the model is loaded for this command.
    """
    from towerd.cli.output import echo_json

    found = _known(target, model) if not again else None
    if found is None:
        with daemon_for(target, {"model": model}, quiet=as_json, engine="embedded") as daemon:
            found = _measure(daemon, again=again, quiet=as_json)
    calibration = found["calibration"]
    if package is not None:
        _write_table(package, found)
    if fidelity is not None and calibration is not None:
        calibration["choices"] = {fidelity: calibration["choices"][fidelity]}
    if as_json:
        echo_json(found)
    else:
        _print(found)


def _known(target: Target, model: str | None) -> Json | None:
    """The calibration of the daemon or the store; None if it has to be measured, and for a model
    that is named: only loading it tells whether the store's calibration is for it."""
    if model is not None:
        return None
    try:
        with connect(target) as backend:
            found = backend.calibration()
    except TowerdError:
        if target.url is not None or target.socket is not None:
            raise
        return None  # no store yet: measuring makes one
    has_any = found["calibration"] is not None or found.get("moved") is not None
    is_done = found["state"] == "done" or found["calibration"] is not None
    return found if has_any and is_done else None


def _measure(daemon: ApiClient, *, again: bool, quiet: bool) -> Json:
    """Make the daemon measure, and wait. Raises TowerdError if it fails."""
    from towerd.cli.output import progress_bar

    found = daemon.calibrate(again=again)
    with progress_bar((), quiet=quiet) as bar:
        task = bar.add_task("calibrating", total=None)
        while found["state"] in ("running", "waiting"):
            time.sleep(POLL_S)
            found = daemon.calibration()
            done, total = found["progress"]["done"], found["progress"]["total"]
            bar.update(task, completed=done, total=total or None)
    has_any = found["calibration"] is not None or found.get("moved") is not None
    if found["state"] == "failed" or not has_any:
        raise TowerdError(f"The calibration failed: {found['why']}")
    return found


def _write_table(folder: Path, found: Json) -> None:
    """Write the file by which the package finds a table. Raises TowerdError."""
    from towerd.slots.row_identity import RowIdentity
    from towerd.tiers.formats.packaged import table_file

    if found["calibration"] is None:
        raise TowerdError("No stored formats were measured, so there is no table to write.")
    name, text = table_file(RowIdentity.from_json(found["row_identity"]), found["calibration"])
    try:
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TowerdError(f"The table cannot be written: {error}") from error


def _moved(limits: Json) -> str:
    """What rows behind changed text cost, in a sentence."""
    costs = ", ".join(
        f"{share:.0%} costs {limits['slope'] * max(0.0, share**2 - limits['noise'] ** 2):.4f}"
        for share in (0.03, 0.05, 0.1)
    )
    return f"a run that deviates by {costs} nats over the noise of {limits['floor_kl']:.4f}"


def _print(found: Json) -> None:
    from towerd.cli.output import moment, show_facts, show_table

    if (limits := found.get("moved")) is not None:
        show_facts([("moved rows", _moved(limits))])
    if found["calibration"] is None:
        return
    calibration: Json = found["calibration"]
    floor = calibration["floor"]
    show_facts(
        [
            ("measured", f"{moment(calibration['made_unix'])}, {floor['n_tokens']:,} tokens"),
            ("in force", _in_force(found)),
            ("noise floor", f"{_nats(floor['kl'])} ± {_nats(floor['ci'])} nats: {floor['shape']}"),
        ]
    )
    bits = calibration["bits"]
    rows: list[tuple[str, ...]] = [
        (
            "as computed: noise alone",
            f"{bits['native']:.2f}",
            _nats(floor["kl"]),
            "0",
            "",
            f"{floor['top1']:.1%}",
            f"{floor['n_tokens']:,}",
        )
    ]
    for name, choice in calibration["choices"].items():
        levels = ", ".join(f"{i}: {each}" for i, each in enumerate(choice["levels"]))
        each_bits = " / ".join(f"{bits[each]:g}" for each in choice["levels"])
        size = f"{each_bits}; mean {choice['bits']:.2f}"
        rows.append((f"{name} ({levels})", size, *_cells(choice["cost"], choice["bound"])))
    for name, choice in ((found.get("transform") or {}).get("choices") or {}).items():
        size = f"{choice['bits']:.2f}"
        rows.append((f"{name}, transform-coded", size, *_cells(choice["cost"], choice["bound"])))
    for name, cost in calibration["grid"]["uniform"].items():
        rows.append((f"{name} in all levels", f"{bits[name]:.2f}", *_cells(cost, None)))
    columns = (
        "rows kept as",
        ">bits by level",
        ">drift (KL)",
        ">excess over noise",
        ">bound",
        ">same top token",
        ">tokens",
    )
    show_table(columns, rows, wraps=True)
    for line in LEGEND:
        click.echo(line)
    for name, choice in calibration["choices"].items():
        if choice["cost"]["ci"] > choice["bound"] / 3:
            click.echo(f"The excess of {name} is known less well than to a third of its bound.")


def _cells(cost: Json, bound: float | None) -> tuple[str, ...]:
    """The cells of a table of formats: its cost and its bound."""
    excess = f"{cost['excess']:+.5f} ± {cost['ci']:.5f}"
    most = "" if bound is None else f"{bound:g}"
    return _nats(cost["kl"]), excess, most, f"{cost['top1']:.1%}", f"{cost['n_tokens']:,}"


def _nats(value: float) -> str:
    """A number with five decimals, or its order of magnitude if that would be 0."""
    return f"{value:.5f}" if value == 0 or value >= 5e-6 else f"{value:.0e}"


def _in_force(found: Json) -> str:
    formats: Any = found["level_formats"]
    if formats is None:
        return f"rows as computed ({found['why']})" if found["why"] else "rows as computed"
    return f"{formats} ({found['fidelity']})" if not found["why"] else str(formats)
