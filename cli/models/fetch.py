"""`towerd models`: the models that can be served by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from towerd.models.known import KnownModel

LINE_SHARE = 0.25
"""Without a terminal, progress is one line for each such share."""


@click.group()
def models() -> None:
    """List models, and fetch those that towerd knows."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(as_json: bool) -> None:
    """List the known models and the files in the models directory."""
    from towerd.cli.output import echo_json, show_table, size
    from towerd.system import paths

    found = _all_models()
    if as_json:
        echo_json({"directory": str(paths.models_dir()), "models": found})
        return
    rows = [
        (
            each["name"],
            size(each["bytes"]),
            each["licence"],
            "yes" if each["is_here"] else "no",
            each["file"],
        )
        for each in found
    ]
    show_table(("NAME", ">SIZE", "LICENCE", "HERE", "FILE"), rows)
    click.echo(f"Models directory: {paths.models_dir()}")


@models.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Accept the terms of a model that has some.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Give up after this time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def get(name: str, yes: bool, timeout_s: float | None, as_json: bool) -> None:
    """Fetch the model NAME into the models directory, and print its path.

    A model that is there is checked, and fetched again if its file is damaged.
    """
    from towerd.cli.output import echo_json
    from towerd.models.known import KNOWN

    if (model := KNOWN.get(name)) is None:
        raise click.UsageError(f"There is no model {name}; known are {', '.join(KNOWN)}.")
    if model.terms and not yes:
        _ask_for_acceptance(model)
    path = fetch(model, timeout_s=timeout_s)
    if as_json:
        echo_json({"name": model.name, "path": str(path), "bytes": path.stat().st_size})
    else:
        click.echo(path)


def _ask_for_acceptance(model: KnownModel) -> None:
    said = f"{model.title} may be used under the {model.licence} only ({model.terms})"
    if not sys.stdin.isatty():
        raise click.ClickException(f"{said}: give --yes to accept them.")
    click.confirm(f"{said}. Do you accept them?", abort=True, err=True)


def fetch(model: KnownModel, *, timeout_s: float | None = None) -> Path:
    """Fetch `model` and show the progress on stderr. Raises ModelError."""
    from rich.progress import DownloadColumn

    from towerd.cli.output import progress_bar
    from towerd.models.fetch import Fetch

    with progress_bar([DownloadColumn(binary_units=True)], quiet=False) as bar:
        display = _Display(model, bar)
        fetching = Fetch(
            model, timeout_s=timeout_s, progress=display.show, on_wait=display.show_waiting
        )
        return fetching.run()


class _Display:
    """The progress of a fetch: a bar, or without a terminal a line for each quarter."""

    def __init__(self, model: KnownModel, bar: Progress) -> None:
        self._model = model
        self._bar = bar
        self._task = bar.add_task(model.title, total=model.bytes_to_fetch, visible=False)
        self._line_at = 0.0

    def show(self, n_bytes: int) -> None:
        """Show that `n_bytes` have arrived."""
        from towerd.cli.output import size

        if not self._line_at:
            total = size(self._model.bytes_to_fetch)
            self._say(f"Fetching {self._model.title} ({total}, {self._model.licence})")
            self._line_at = LINE_SHARE
        self._bar.update(self._task, completed=n_bytes, visible=True)
        share = n_bytes / self._model.bytes_to_fetch
        if self._bar.disable and share >= self._line_at:
            self._say(f"  {share:.0%}")
            self._line_at = share - share % LINE_SHARE + LINE_SHARE

    def show_waiting(self) -> None:
        """Show that another process is fetching."""
        self._say("Another process is fetching a model: waiting for it.")

    def _say(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)


def _all_models() -> list[dict[str, Any]]:
    from towerd.models.bundled import NAME, SHORT_NAME, bundled_model
    from towerd.models.known import KNOWN
    from towerd.system import paths

    found = [
        {
            "name": each.name,
            "file": each.file,
            "bytes": each.bytes,
            "licence": each.licence,
            "is_here": each.is_at(each.path),
        }
        for each in KNOWN.values()
    ]
    bundled = {"name": SHORT_NAME, "file": NAME, "bytes": bundled_model().stat().st_size}
    found.append(bundled | {"licence": "MIT", "is_here": True})
    files = {each["file"] for each in found if each["is_here"]}
    for path in sorted(paths.models_dir().glob("*.gguf")):
        if path.name not in files and path.is_file():
            other = {"name": path.name, "file": path.name, "bytes": path.stat().st_size}
            found.append(other | {"licence": "", "is_here": True})
    return found
