"""Where settings come from: flags, TOWERD_* variables, towerd.toml.

Flags take precedence over variables, those over the file, and that over the defaults in
`towerd.settings.config`.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from towerd.errors import ConfigError
from towerd.settings.config import Config, settings
from towerd.settings.setting import keys_from
from towerd.system import paths

ENV_PREFIX = "TOWERD_"
ENV_OTHER = ("TOWERD_CMAKE_ARGS", "TOWERD_CONFIG", "TOWERD_KERNELS")
"""Variables that are not settings: how llama.cpp is compiled, the path of towerd.toml, the kernels
to force."""
ENV_TEST_PREFIX = "TOWERD_TEST_"
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
    env = os.environ if env is None else env
    if toml_path is None and env.get("TOWERD_CONFIG"):
        toml_path = Path(env["TOWERD_CONFIG"]).expanduser()
    values = _from_toml(toml_path)
    values |= _from_env(env)
    values |= _from_flags(flags)
    if values.get("api_key_file") is not None:
        keys = values.get("api_keys", ()) + _read_keys(values["api_key_file"])
        values["api_keys"] = keys_from((f"{tenant}:{key}" for key, tenant in keys), "The keys")
    return Config(**values)


def _from_toml(path: Path | None) -> dict[str, Any]:
    wanted = path is not None
    path = paths.config_file() if path is None else path
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        if wanted:
            raise ConfigError(f"The settings file {path} does not exist.") from None
        return {}
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    known = settings()
    for key in table:
        if key not in known:
            raise _unknown(key, str(path), known)
    return {key: known[key].parse(raw, f"{key} in {path}") for key, raw in table.items()}


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + name.upper(): name for name in settings()}
    values: dict[str, Any] = {}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(ENV_TEST_PREFIX):
            continue
        if variable in ENV_OTHER:
            continue
        if variable not in known:
            raise _unknown(variable, "the environment", known)
        values[known[variable]] = settings()[known[variable]].parse(raw, variable)
    return values


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    known = settings()
    values: dict[str, Any] = {}
    for name, raw in flags.items():
        if name not in known:
            raise _unknown(name, "the command line", known)
        if raw is not None and raw != ():
            values[name] = known[name].parse(raw, known[name].flags[0])
    return values


def _unknown(key: str, place: str, known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]}?" if near else "."
    return ConfigError(f"Unknown setting {key} in {place}{hint}")


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
