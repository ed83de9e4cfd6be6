"""Where settings come from: flags, TOWERD_* variables, towerd.toml.

Flags take precedence over variables, those over the file, and that over the defaults in
`towerd.settings.config`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towerd.errors import ConfigError
from towerd.settings.config import Config, settings
from towerd.settings.model_tables import ModelTables, parse_table, tables_from, unknown_setting
from towerd.settings.setting import OLD_NAMES, keys_from, parse_path
from towerd.settings.vertex import vertex_of
from towerd.system import paths

ENV_PREFIX = "TOWERD_"
ENV_OTHER = (
    "TOWERD_CMAKE_ARGS",
    "TOWERD_CONFIG",
    "TOWERD_FILE_PASSPHRASE",
    "TOWERD_KERNELS",
    "TOWERD_LLAMA_CPP_BUILD",
    "TOWERD_NEW_PASSPHRASE",
    "TOWERD_PASSPHRASE",
)
"""Variables that are not settings: how llama.cpp is compiled, the path of towerd.toml, the kernels
to force, where a build of llama.cpp for a wheel is, what opens an encrypted store."""
ENV_TEST_PREFIX = "TOWERD_TEST_"
MODEL_NAMES = frozenset(("model", "hf_repo", "hf_file"))
"""Settings that together say which model is served."""
KEY_FILE_BYTES_MAX = 2**20


def load(
    flags: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> Config:
    """The Config of flags (field name -> text or value, None: not given), variables and file.

    `env` None is the process's own environment. `toml_path` None is $TOWERD_CONFIG, else the
    user's towerd.toml if there is one; a path that was given must exist. Raises ConfigError, which
    names the key, the place and the nearest known key.
    """
    return load_models(flags, env, toml_path).config


def load_models(
    flags: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> ModelTables:
    """As `load`, with the [models.NAME] tables of the file. Raises ConfigError."""
    env = os.environ if env is None else env
    if toml_path is None and env.get("TOWERD_CONFIG"):
        toml_path = parse_path(env["TOWERD_CONFIG"], "TOWERD_CONFIG")
    table, place = _read_toml(toml_path)
    tables = tables_from(table.pop("models", {}), place)
    in_file = parse_table(table, place)
    from_env, from_flags = _from_env(env), _from_flags(flags)
    given = _without_other_model(from_env, from_flags) | from_flags
    path = given.get("api_key_file", in_file.get("api_key_file"))
    if path is not None:
        keys = given.get("api_keys", in_file.get("api_keys", ())) + _read_keys(path)
        given["api_keys"] = keys_from((f"{tenant}:{key}" for key, tenant in keys), "The keys")
    if (vertex := vertex_of(env)) is not None:
        given |= {"vertex": vertex, "port": vertex.port}
    config = Config(**(_without_other_model(in_file, given) | given))
    return ModelTables(config, tables, in_file, given)


def _without_other_model(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without the model that they name, if `given`, which takes precedence, names one."""
    if not MODEL_NAMES.intersection(given):
        return values
    return {name: value for name, value in values.items() if name not in MODEL_NAMES}


def _read_toml(path: Path | None) -> tuple[dict[str, Any], str]:
    """The table of the settings file, empty if there is none, and what to call the file."""
    wanted = path is not None
    path = paths.config_file() if path is None else path
    try:
        return tomllib.loads(path.read_text()), str(path)
    except FileNotFoundError:
        if wanted:
            raise ConfigError(f"The settings file {path} does not exist.") from None
        return {}, str(path)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    names = {name: name for name in settings()} | OLD_NAMES
    known = {ENV_PREFIX + name.upper(): now for name, now in names.items()}
    values: dict[str, Any] = {}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(ENV_TEST_PREFIX):
            continue
        if variable in ENV_OTHER:
            continue
        if variable not in known:
            raise unknown_setting(variable, "the environment", known)
        values[known[variable]] = settings()[known[variable]].parse(raw, variable)
    return values


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    known = settings()
    values: dict[str, Any] = {}
    for name, raw in flags.items():
        if name not in known:
            raise unknown_setting(name, "the command line", known)
        if raw is not None and raw != ():
            values[name] = known[name].parse(raw, known[name].flags[0])
    return values


def _read_keys(path: Path) -> tuple[tuple[str, str], ...]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(KEY_FILE_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the key file {path}: {error}.") from error
    if len(text) > KEY_FILE_BYTES_MAX:
        raise ConfigError(f"The key file {path} is larger than {KEY_FILE_BYTES_MAX} bytes.")
    keys = keys_from(text.splitlines(), str(path))
    if not keys:
        raise ConfigError(f"The key file {path} has no key in it.")
    return keys
