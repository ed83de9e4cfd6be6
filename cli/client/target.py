"""Finds what towerctl talks to: the running daemon; if none is running the store itself, or a daemon with a
model for this command."""

from __future__ import annotations

import functools
import socket as sockets
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from towerd.errors import ConfigError
from towerd.settings.config import Config, settings
from towerd.settings.sources import load
from towerd.system.paths import runtime_socket

if TYPE_CHECKING:
    from towerd.cli.client.api_client import ApiClient

Command: TypeAlias = Callable[..., Any]


config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings file, as for towerd serve.",
)


@dataclass(frozen=True, slots=True)
class Target:
    """The daemon or store that the command line names."""

    socket: str | None = None
    url: str | None = None
    api_key: str | None = None
    store_dir: str | None = None
    config_path: Path | None = None
    model: str | None = None
    """The GGUF whose vocabulary a store without a daemon needs for `.tower` files."""

    def config(self, **flags: Any) -> Config:
        """The settings in force, with `flags` (field name -> text) on top. Raises ConfigError."""
        places = {"socket": self.socket, "store_dir": self.store_dir, "model": self.model}
        return load(places | flags, toml_path=self.config_path)


def target_options(command: Command) -> Command:
    """The options that name a daemon or store; `command` gets them as `target`."""

    @functools.wraps(command)
    def run(
        socket: str | None,
        url: str | None,
        api_key: str | None,
        store_dir: str | None,
        config_path: Path | None,
        **rest: Any,
    ) -> Any:
        return command(target=Target(socket, url, api_key, store_dir, config_path), **rest)

    for option in (
        config_option,
        click.option(
            "--store-dir",
            metavar="PATH",
            help="Ask the daemon of this store, or look into the store itself if it has none.",
        ),
        click.option("--api-key", metavar="KEY", help="Key to present with --url."),
        click.option("--url", metavar="URL", help="Ask the daemon at this http(s) address."),
        click.option("--socket", metavar="PATH", help="Ask the daemon at this Unix socket."),
    ):
        run = option(run)
    return run


def json_option(command: Command) -> Command:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")(command)


def setting_option(name: str) -> Callable[[Command], Command]:
    """The option of one Config field, as `towerd serve` has it."""
    spec = settings()[name]
    kind = click.Choice(spec.choices) if spec.choices else None
    metavar = None if spec.choices else {"path": "PATH", "int": "N"}.get(spec.kind, "TEXT")
    return click.option(*spec.flags, name, type=kind, metavar=metavar, help=spec.help)


def connect(target: Target) -> AbstractContextManager[ApiClient]:
    """The daemon of --url or --socket; else the daemon of the store, the configured one or that of
    --store-dir, if it listens on its socket; else that store.

    Raises ConfigError (no daemon listens at the named place, or conflicting options); the context
    manager raises StoreError."""
    check_one_place(target)
    daemon = find_daemon(target)
    return _open_store(target.config()) if daemon is None else daemon


def check_one_place(target: Target) -> None:
    """ConfigError if the command line names several."""
    given = [target.url, target.socket, target.store_dir]
    if sum(each is not None for each in given) > 1:
        raise ConfigError("Give one of --url, --socket and --store-dir, not several.")


def find_daemon(target: Target) -> ApiClient | None:
    """The daemon of --url or --socket, else that of the store if it listens on its socket."""
    from towerd.cli.client.api_client import ApiClient

    if target.api_key is not None and target.url is None:
        raise ConfigError("--api-key goes with --url; the Unix socket needs no key.")
    if target.url is not None:
        return ApiClient.at_url(target.url, target.api_key)
    path = _socket(target)
    if listens(path):
        return ApiClient.at_socket(path)
    if target.socket is not None:
        raise ConfigError(f"No daemon listens on {path}: start one with towerd serve.")
    return None


def _socket(target: Target) -> Path:
    """The socket to look at. One that is configured belongs to the configured store."""
    config = target.config()
    if target.store_dir is not None and target.socket is None:
        usual = replace(target, store_dir=None).config()
        if usual.store_dir.resolve() != config.store_dir.resolve():
            return runtime_socket(config.store_dir)
    assert config.socket is not None
    return config.socket


def listens(path: Path) -> bool:
    """Whether a process accepts connections on a Unix socket."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _open_store(config: Config) -> AbstractContextManager[ApiClient]:
    from towerd.app.store_app import open_store_app
    from towerd.cli.client.private_daemon import PrivateDaemon

    return PrivateDaemon(open_store_app(config), config.store_dir, has_model=False)


def daemon_for(
    target: Target, model: dict[str, Any], *, quiet: bool, engine: str | None = None
) -> AbstractContextManager[ApiClient]:
    """The running daemon, or a private one for this command; engine: that of a private one, None: as it
    is set."""
    check_one_place(target)
    found = find_daemon(target)
    if found is not None:
        try:
            check_model(found, model)
        except BaseException:
            found.close()
            raise
        return found
    config = target.config(**model, engine=engine)
    if not quiet:
        name = config.model.name if config.model else "the default model"
        click.echo(f"No daemon runs: loading {name} for this command.", err=True)
    return _private(config)


def _private(config: Config) -> AbstractContextManager[ApiClient]:
    from towerd import log
    from towerd.app.daemon import open_app
    from towerd.cli.client.private_daemon import PrivateDaemon
    from towerd.cli.models.located import located

    log.configure("error", config.log_format)
    return PrivateDaemon(open_app(located(config)), config.store_dir, has_model=True)


def check_model(daemon: ApiClient, model: dict[str, Any]) -> None:
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
