"""The [models.NAME] tables of towerd.toml: settings of single models, for a router of several.

A flag or variable beats a table, a table what the file says for all models. `[models."*"]` is for
all models that do not say otherwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from towerd.errors import ConfigError
from towerd.settings.config import Config, settings, with_server_args
from towerd.settings.setting import OLD_NAMES, Setting

ALL = "*"
OF_ROUTER = frozenset(
    (
        *("host", "port", "socket", "api_keys", "api_key_file", "cors_origins", "store_dir"),
        *("cors_methods", "cors_headers", "cors_credentials", "ui_mcp_proxy", "sleep_idle_seconds"),
        *("request_bytes_max", "models_dir", "models_max", "models_autoload", "memory"),
        *("ram_max", "search"),
    )
)
"""Settings that no single model has."""
FETCHED = frozenset(("hf_repo", "hf_file", "hf_repo_draft", "hf_token"))
"""Settings that say what to fetch; `towerd serve` has put files in their place."""
OWN = {
    "keep": Setting("bool", "Never unload this model to make room."),
    "idle_s": Setting("float", "Seconds without a request after which it is unloaded.", low=0),
}
"""What only these tables have."""


@dataclass(frozen=True, slots=True)
class ModelTable:
    """One table."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Field name of Config -> value."""
    keep: bool = False
    """Never unloaded to make room for another model."""
    idle_s: float | None = None
    """Seconds without a request after which the model is unloaded; None: never."""


@dataclass(frozen=True, slots=True)
class ModelTables:
    """The settings of a daemon and of every model that it may serve."""

    config: Config
    """The daemon's own."""
    tables: Mapping[str, ModelTable] = field(default_factory=dict)
    in_file: Mapping[str, Any] = field(default_factory=dict)
    """What the file sets for all models."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What flags and variables set for all models."""
    server_args: tuple[str, ...] = ()
    """llama-server's flags for all models."""

    @property
    def are_many(self) -> bool:
        """Whether several models are served: there are some, and none is named alone."""
        named = any((self.config.model, self.config.hf_repo, self.config.upstream))
        return not named and (self.config.models_dir is not None or bool(self.tables))

    def with_server_args(self, words: tuple[str, ...]) -> ModelTables:
        """These settings, with `words` after the llama-server flags. Raises ConfigError."""
        return replace(self, config=with_server_args(self.config, words), server_args=words)

    def table(self, name: str) -> ModelTable:
        """The table of a model; one that sets nothing if there is none."""
        table = self.tables.get(name, self.tables.get(ALL, ModelTable()))
        if table.idle_s is None and self.config.sleep_idle_seconds > 0:
            return replace(table, idle_s=self.config.sleep_idle_seconds)
        return table

    def config_of(self, name: str, server_args: tuple[str, ...], **own: Any) -> Config:
        """The settings of the process of one model. own: what its router decides; server_args: of
        this model, before those of all. Raises ConfigError that names the model."""
        values = {**self.in_file, **self.table(name).values, **self.given, **own}
        for key in ("models_dir", "memory", *FETCHED):
            values.pop(key, None)
        values["ram_max"] = own.get("ram_max", self.config.ram_max)
        try:
            return with_server_args(Config(**values), (*server_args, *self.server_args))
        except ConfigError as error:
            raise ConfigError(f"The settings of the model {name}: {error.message}") from error


def tables_from(raw: object, place: str) -> dict[str, ModelTable]:
    """The tables of the file at `place`, by the model's name; each has what `[models."*"]` says and
    it does not. Raises ConfigError."""
    if not isinstance(raw, dict) or not all(isinstance(each, dict) for each in raw.values()):
        raise ConfigError(f"models in {place} must be tables, such as [models.NAME].")
    common = raw.get(ALL, {})
    return {name: _table(common | own, f"[models.{name}] of {place}") for name, own in raw.items()}


def _table(raw: dict[str, Any], place: str) -> ModelTable:
    own = {key: OWN[key].parse(raw[key], f"{key} in {place}") for key in OWN if key in raw}
    rest = {key: value for key, value in raw.items() if key not in OWN}
    for key in rest:
        if key in OF_ROUTER:
            raise ConfigError(f"{key} in {place} is a setting of the daemon, not of one model.")
    return ModelTable(parse_table(rest, place, (*settings(), *OWN)), **own)


def parse_table(table: Mapping[str, Any], place: str, names: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a TOML table of settings. names: those that may be meant by a wrong one, if
    more than the settings. Raises ConfigError."""
    known = settings()
    table = {OLD_NAMES.get(key, key): raw for key, raw in table.items()}
    for key in table:
        if key not in known:
            raise unknown_setting(key, place, names or known)
    return {key: known[key].parse(raw, f"{key} in {place}") for key, raw in table.items()}


def unknown_setting(key: str, place: str, known: Iterable[str]) -> ConfigError:
    """The error for a setting that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]}?" if near else "."
    return ConfigError(f"Unknown setting {key} in {place}{hint}")
