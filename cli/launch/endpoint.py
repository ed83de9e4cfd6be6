"""Where an agent finds its model: the address and key of a daemon, and the model's name and context."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from towerd.cli.client.target import Target, check_model
from towerd.errors import ConfigError

if TYPE_CHECKING:
    from towerd.cli.client.api_client import ApiClient
    from towerd.cli.client.transport import Json

NO_KEY = "none"
"""What a daemon that wants no key is given: agents want to give one."""
POLL_S = 0.1
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model of a daemon."""

    url: str
    """Without a path."""
    key: str
    model: str
    n_ctx: int
    n_ctx_train: int

    @property
    def host(self) -> str:
        """Of the address."""
        return urlsplit(self.url).hostname or ""


def wait_ready(daemon: ApiClient) -> None:
    """Wait while the daemon loads its model. Raises TowerdError: it has ended."""
    is_said = False
    while not daemon.is_ready():
        if not is_said:
            click.echo(f"The daemon at {daemon.where} is loading its model.", err=True)
            is_said = True
        time.sleep(POLL_S)


def endpoint_of(daemon: ApiClient, target: Target, wanted: Mapping[str, str | None]) -> Endpoint:
    """The endpoint of a daemon that is ready. wanted: the model and the settings that the command line
    names, None: it does not. Raises ConfigError: they are others, or the daemon has several models and
    none is named, or it needs a key that is not known."""
    if target.url is not None:
        url, key = target.url.rstrip("/"), target.api_key or NO_KEY
    else:
        url, key = _local(daemon, target)
    routed = daemon.routed()
    if routed is None:
        check_model(daemon, dict(wanted))
        (found,) = daemon.models()
    else:
        check_model(daemon, {**wanted, "model": None})
        found = _chosen(daemon, routed, wanted.get("model"))
    meta = found.get("meta")
    if meta is None:
        raise ConfigError(f"The daemon at {daemon.where} does not say what context its model has.")
    return Endpoint(url, key, found["id"], meta["n_ctx"], meta["n_ctx_train"])


def _local(daemon: ApiClient, target: Target) -> tuple[str, str]:
    """The address and the key of a daemon that was found by its socket. Raises ConfigError."""
    address = daemon.address()
    if not address["urls"]:
        raise ConfigError(f"The daemon at {daemon.where} has no address that an agent could use.")
    key = NO_KEY
    if address["needs_key"]:
        keys = target.config().api_keys
        if not keys:
            raise ConfigError(
                f"The daemon wants a key: give it with --url {address['urls'][0]} --api-key KEY."
            )
        key = keys[0][0]
    return _reachable(address["urls"][0]), key


def _reachable(url: str) -> str:
    """The address at which a daemon that listens on all of them is reached from here."""
    parts = urlsplit(url)
    host = _ANY_ADDRESS.get(parts.hostname or "")
    return url if host is None else f"{parts.scheme}://{host}:{parts.port}"


def _chosen(daemon: ApiClient, routed: list[Json], model: str | None) -> Json:
    """The model of a router, loaded. Raises ConfigError: none is named, or it has none of that name."""
    if model is None:
        loaded = [each for each in routed if each["status"]["value"] == "loaded"]
        fit = loaded if len(routed) > 1 else routed
    else:
        fit = [each for each in routed if model in (each["id"], *each.get("aliases", ()))]
    if len(fit) != 1:
        names = ", ".join(each["id"] for each in routed)
        raise ConfigError(f"The daemon serves several models, name one with --model: {names}.")
    return _loaded(daemon, fit[0])


def _loaded(daemon: ApiClient, model: Json) -> Json:
    """The model of a router once it is loaded. Raises ConfigError: it could not be."""
    name = model["id"]
    if model["status"]["value"] == "unloaded":
        daemon.load(name)
        model = _now(daemon, name)
    while model["status"]["value"] == "loading":
        time.sleep(POLL_S)
        model = _now(daemon, name)
    if "meta" not in model:
        raise ConfigError(f"The daemon at {daemon.where} could not load {name}: its log says why.")
    return model


def _now(daemon: ApiClient, name: str) -> Json:
    return next(each for each in daemon.models() if each["id"] == name)
