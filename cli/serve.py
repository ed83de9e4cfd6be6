"""`towerd serve`: run the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from towerd.cli.options import config_options
from towerd.config import Config, load, no_projector, with_server_args


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings file. [default: towerd.toml in the user's config directory; TOWERD_CONFIG]",
)
@config_options
@click.option("--mmproj", type=click.Path(), hidden=True, help="Refused, with what to do instead.")
@click.argument("server_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAG...]")
def serve(
    config_path: Path | None, server_args: tuple[str, ...], mmproj: str | None, **flags: Any
) -> None:
    """Serve a model, with llama-server's HTTP API, and remember every conversation.

    With --engine llama-server, what stands after -- are flags for the llama-server.

    Every option can also stand in towerd.toml (its long name with underscores) or in the
    variable named in brackets. Sizes are bytes or texts such as 8GiB or 500MB.
    """
    from towerd import log

    if mmproj is not None:  # llama-server's flag, which people give here
        raise no_projector()
    config = load(flags, toml_path=config_path)
    if server_args:
        config = with_server_args(config, server_args)
    log.configure(config.log_level, config.log_format)
    _run(config)


def _run(config: Config) -> None:
    """Apart from serve, so that wrong settings are told before llama.cpp is loaded."""
    from towerd.app import run

    run(config)
