"""A daemon with a model: the running one, or a private one for a single command."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.client.target import Target, check_one_place, find_daemon
from towerd.errors import ConfigError

if TYPE_CHECKING:
    from towerd.cli.client.api_client import ApiClient


def daemon_for(
    target: Target, model: dict[str, Any], *, quiet: bool
) -> AbstractContextManager[ApiClient]:
    """The running daemon, or a private one for this command."""
    check_one_place(target)
    found = find_daemon(target)
    if found is not None:
        try:
            _check_model(found, model)
        except BaseException:
            found.close()
            raise
        return found
    config = target.config(**model)
    if not quiet:
        name = config.model.name if config.model else "the default model"
        click.echo(f"No daemon runs: loading {name} for this command.", err=True)
    return _private(config)


def _private(config: Any) -> AbstractContextManager[ApiClient]:
    from towerd import log
    from towerd.app.daemon import open_app
    from towerd.cli.client.private_daemon import PrivateDaemon
    from towerd.cli.models.located import located

    log.configure("error", config.log_format)
    return PrivateDaemon(open_app(located(config)), config.store_dir, has_model=True)


def _check_model(daemon: ApiClient, model: dict[str, Any]) -> None:
    """Raises ConfigError if the command line asks for another model or for settings."""
    from towerd.models.bundled import find_model

    others = [name for name, value in model.items() if value is not None and name != "model"]
    if others:
        flags = ", ".join("--" + name.replace("_", "-") for name in others)
        raise ConfigError(f"A daemon runs at {daemon.where}: {flags} would change nothing.")
    if model.get("model") is None:
        return
    wanted = find_model(Path(model["model"]).expanduser()).resolve()
    served = daemon.stats()["model_path"]
    if wanted != Path(served).resolve():
        raise ConfigError(f"The daemon at {daemon.where} serves {served}, not {wanted}.")
