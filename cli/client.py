"""Where towerctl gets its answers: the running daemon, or the store itself when none runs."""

from __future__ import annotations

import functools
import socket as sockets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import click

from towerd.config import Config, load, settings
from towerd.errors import ConfigError, StoreLocked

if TYPE_CHECKING:
    from towerd.cli.daemon import DaemonBackend
    from towerd.cli.direct import StoreBackend

Command: TypeAlias = Callable[..., Any]
Json: TypeAlias = dict[str, Any]
OnBytes: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

PAGE_MAX = 1000
"""Entries that one listing gives at most."""


class Backend(Protocol):
    """Questions about a store. Both implementations answer with the same values: those of the
    daemon's own HTTP endpoints. Every method raises TowerdError."""

    @property
    def kind(self) -> str:
        """`daemon` or `store`."""
        ...

    @property
    def where(self) -> str:
        """For people: the address or directory that answers."""
        ...

    def close(self) -> None: ...
    def sessions(self, limit: int, scope: str | None = None) -> list[Json]:
        """The sessions used last first."""
        ...

    def session(self, id: str, scope: str | None = None, *, text: bool = False) -> Json:
        """`session`, `turns`, `text` (that of the current branch, or None) and `kept`: what is
        live of a chat with a budget, or None."""
        ...

    def delete_session(self, id: str, scope: str | None = None) -> None: ...
    def freeze_session(self, id: str, scope: str | None = None) -> Json:
        """Keep a session as coded text: `session`, and `changed`: it was not frozen yet."""
        ...

    def thaw_session(self, id: str, scope: str | None = None) -> Json:
        """Get a frozen session's tokens back: `session`, and `changed`: it was frozen."""
        ...

    def idle_sessions(self, idle_s: int, limit: int, scope: str | None = None) -> list[Json]:
        """Sessions that can be frozen and were not used for `idle_s`, the longest unused first."""
        ...

    def export_session(self, id: str, scope: str | None = None) -> bytes:
        """The session as a `.tower` file."""
        ...

    def import_session(self, data: bytes, scope: str | None = None) -> Json:
        """Enter the session of a `.tower` file: `session`, `added` (turns) and `bases`."""
        ...

    def segments(self, sort: str, limit: int, offset: int = 0, scope: str | None = None) -> Json:
        """`segments`, sorted by used, tokens, hits or id, and `total`."""
        ...

    def segment(self, id: int, *, text: bool = False, ids: bool = False) -> Json:
        """One segment with `path` and `children` ids; with `text` and `ids` if asked for."""
        ...

    def why(self, id: int) -> Json:
        """`segment`, and `why`: what the policies of the running daemon go by."""
        ...

    def trie(self, root: int, depth: int, limit: int, scope: str | None = None) -> Json:
        """`root`, `trie` (segments with nested `children`), `segments` (how many), `truncated`."""
        ...

    def pins(self) -> list[Json]: ...
    def pin(self, segment: int) -> Json: ...
    def unpin(self, segment: int) -> None: ...
    def bases(self) -> list[Json]: ...
    def remove_base(self, name: str, scope: str) -> None: ...
    def model_path(self) -> Path:
        """The GGUF that is served, or was served last. Raises TowerdError if it is not here."""
        ...

    def stats(self) -> Json:
        """The daemon's /towerd/v1/stats; what only a daemon knows is None without one."""
        ...

    def calibration(self) -> Json:
        """How far the calibration is, and its result (`calibration`, maybe None)."""
        ...

    def verify(self, repair: bool, progress: OnBytes) -> Json: ...
    def gc(self, quarantine_days: float, dry_run: bool) -> Json: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where the command line says to look."""

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
    """Options that say where to look; `command` gets them as `target`."""

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

    config_help = "Settings file, as for towerd serve."
    for option in (
        click.option("--config", "config_path", type=click.Path(path_type=Path), help=config_help),
        click.option(
            "--store-dir",
            metavar="PATH",
            help="Look into this store directory itself; no daemon may have it open.",
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


def connect(target: Target) -> DaemonBackend | StoreBackend:
    """The daemon of --url or --socket; the store of --store-dir; else the daemon of the
    configured socket if one listens there, else the configured store.

    Raises ConfigError (nobody listens where the command line says, or too much is said) and
    StoreError."""
    given = [target.url, target.socket, target.store_dir]
    if sum(each is not None for each in given) > 1:
        raise ConfigError("Give one of --url, --socket and --store-dir, not several.")
    if target.store_dir is None:
        daemon = find_daemon(target)
        if daemon is not None:
            return daemon
    return _open_store(target.config())


def find_daemon(target: Target) -> DaemonBackend | None:
    """The daemon of --url or --socket, else that of the configured socket if one listens there."""
    from towerd.cli.daemon import DaemonBackend

    if target.api_key is not None and target.url is None:
        raise ConfigError("--api-key goes with --url; the Unix socket needs no key.")
    if target.url is not None:
        return DaemonBackend.at_url(target.url, target.api_key)
    path = target.config().socket
    assert path is not None
    if listens(path):
        return DaemonBackend.at_socket(path)
    if target.socket is not None:
        raise ConfigError(f"No daemon listens on {path}: start one with towerd serve.")
    return None


def listens(path: Path) -> bool:
    """Whether somebody accepts connections on a Unix socket."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _open_store(config: Config) -> StoreBackend:
    from towerd.cli.direct import StoreBackend

    try:
        return StoreBackend.at(config.store_dir, config.model)
    except StoreLocked as error:
        raise StoreLocked(
            f"{error.message}; ask a running daemon with --socket or --url"
        ) from error
