"""`towerd models get`: fetching models, with the progress shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from towerd.cli.progress import Lines
    from towerd.models.hub.cache import HubModel
    from towerd.models.known import KnownModel

LINE_SHARE = 0.25
"""Without a terminal, progress is one line for each such share."""


@click.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Accept the terms of a model that has terms.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Give up after this time.",
)
@click.option(
    "--hf-token", "-hft", "token", metavar="TOKEN", help="Token of the Hub. [default: HF_TOKEN]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def get(name: str, yes: bool, timeout_s: float | None, token: str | None, as_json: bool) -> None:
    """Fetch a model and print its path: one that towerd knows by NAME, or OWNER/REPO[:QUANT] of
    the Hugging Face Hub.

    A known model that is there is checked, and fetched again if its file is damaged.
    """
    from towerd.cli.output import echo_json

    found, path = (
        _fetch_repo(name, token, timeout_s) if "/" in name else _fetch_known(name, yes, timeout_s)
    )
    if as_json:
        echo_json({"name": found, "path": str(path), "bytes": path.stat().st_size})
    else:
        click.echo(path)


def _fetch_known(name: str, yes: bool, timeout_s: float | None) -> tuple[str, Path]:
    from towerd.models.known import KNOWN

    if (model := KNOWN.get(name)) is None:
        raise click.UsageError(
            f"There is no model {name}: take one of {', '.join(KNOWN)}, or OWNER/REPO[:QUANT] "
            "of the Hugging Face Hub."
        )
    if model.terms and not yes:
        _ask_for_acceptance(model)
    return model.name, fetch(model, timeout_s=timeout_s)


def _fetch_repo(name: str, token: str | None, timeout_s: float | None) -> tuple[str, Path]:
    if timeout_s is not None:
        raise click.UsageError("--timeout is for the models that towerd knows by name.")
    model = fetch_from_hub(name, token=token)
    return model.name, model.path


def _ask_for_acceptance(model: KnownModel) -> None:
    said = f"{model.title} may be used under the {model.licence} only ({model.terms})"
    if not sys.stdin.isatty():
        raise click.ClickException(f"{said}: give --yes to accept them.")
    click.confirm(f"{said}. Do you accept them?", abort=True, err=True)


def fetch(model: KnownModel, *, timeout_s: float | None = None) -> Path:
    """Fetch `model` and show the progress on stderr. Raises ModelError."""
    from towerd.models.fetch import Fetch

    with _Display.open() as display:
        display.expect(model.title, model.bytes_to_fetch, model.licence)
        fetching = Fetch(
            model, timeout_s=timeout_s, progress=display.show, on_wait=display.show_waiting
        )
        return fetching.run()


def fetch_from_hub(
    name: str,
    *,
    file: str = "",
    with_projector: bool = True,
    token: str | None = None,
    offline: bool = False,
) -> HubModel:
    """Fetch OWNER/REPO[:QUANT] from the Hub and show the progress on stderr. Raises ModelError."""
    from towerd.models.hub.choice import RepoName
    from towerd.models.hub.download import Watcher
    from towerd.models.hub.download import fetch as fetch_files

    with _Display.open() as display:
        return fetch_files(
            RepoName.parse(name),
            file=file,
            with_projector=with_projector,
            token=token,
            offline=offline,
            watcher=Watcher(display.expect, display.add),
        )


class _Display:
    """The progress of a fetch: a bar, or without a terminal a line for each quarter, and each minute."""

    def __init__(self, bar: Progress, lines: Lines) -> None:
        self._bar, self._lines = bar, lines
        self._line = lines.add_task("fetching", total=None)
        self._task = bar.add_task("", visible=False)
        self._title = self._note = ""
        self._n_total = 1
        self._n_bytes = 0
        self._line_at = 0.0

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[_Display]:
        """A display whose bar is there until the block ends."""
        from rich.progress import DownloadColumn

        from towerd.cli.output import progress_lines, terminal_bar

        columns = [DownloadColumn(binary_units=True)]
        with (
            terminal_bar(columns, quiet=False) as bar,
            progress_lines(quiet=not bar.disable) as lines,
        ):
            yield cls(bar, lines)

    def expect(self, title: str, n_bytes: int, note: str = "") -> None:
        """What will be fetched, and how much of it; `note` is said with the size."""
        self._title, self._n_total, self._note = title, max(1, n_bytes), note
        self._bar.update(self._task, description=title, total=self._n_total)
        self._lines.update(self._line, description=title, total=self._n_total)

    def add(self, n_bytes: int) -> None:
        """Show that so many more have arrived; negative: that they are fetched again."""
        self._n_bytes += n_bytes
        self.show(self._n_bytes)

    def show(self, n_bytes: int) -> None:
        """Show that `n_bytes` have arrived."""
        from towerd.cli.output import size

        if not self._line_at:
            note = f", {self._note}" if self._note else ""
            self._say(f"Fetching {self._title} ({size(self._n_total)}{note})")
            self._line_at = LINE_SHARE
        self._bar.update(self._task, completed=n_bytes, visible=True)
        self._lines.update(self._line, completed=n_bytes)
        share = n_bytes / self._n_total
        if self._bar.disable and share >= self._line_at:
            self._say(f"  {share:.0%}")
            self._line_at = share - share % LINE_SHARE + LINE_SHARE

    def show_waiting(self) -> None:
        """Show that another process is fetching."""
        self._say("Another process is fetching a model: waiting for it.")

    def _say(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)
