"""A setting: its type, its limits, and the parsing of its text."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from towerd.errors import ConfigError

Kind: TypeAlias = Literal["int", "float", "bool", "text", "path", "size", "list", "args", "keys"]

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
LOCAL_TENANT = "local"
"""The tenant of a key that names none, and of every caller while no key is set."""
PUBLIC_TENANT = "public"
"""Reserved: the scope of what the operator shares with all tenants."""
OLD_NAMES = {"boundary_bytes": "checkpoint_bytes", "boundary_tokens": "checkpoint_tokens"}
"""Names that settings had in the last release, in variables and towerd.toml, and those they have now."""
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Setting:
    """The user-facing description of one field of Config. `low` and `high` are inclusive."""

    kind: Kind
    help: str
    flags: tuple[str, ...] = ()
    """Spellings on the command line, the long one first; for a bool those that switch it on."""
    off_flags: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    auto: str = ""
    """A description of the default that is computed at start from -1, 0 or None."""
    words: Mapping[str, str] = field(default_factory=dict)
    """llama-server's other spellings of values -> the text that is parsed for each."""

    def parse(self, raw: object, place: str) -> Any:
        """The value of `raw`, text or TOML. Raises ConfigError, in which `place` names it."""
        raw = self.words.get(raw, raw) if isinstance(raw, str) else raw
        value = _PARSERS[self.kind](raw, place)
        self.check(value, place)
        return value

    def check(self, value: Any, place: str) -> None:
        """Raises ConfigError unless `value` is allowed."""
        if self.choices and value not in self.choices:
            allowed = ", ".join(self.choices)
            raise ConfigError(f"{place} must be one of {allowed}, not {value!r}.")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        if not math.isfinite(value):
            raise ConfigError(f"{place} must be a finite number.")
        if self.low is not None and value < self.low:
            raise ConfigError(f"{place} must be at least {self.low:g}, not {value:g}.")
        if self.high is not None and value > self.high:
            raise ConfigError(f"{place} must be at most {self.high:g}, not {value:g}.")


def config_field(
    default: Any,
    kind: Kind,
    flags: str,
    help: str,
    *,
    off: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    auto: str = "",
    secret: bool = False,
    words: dict[str, str] | None = None,
) -> Any:
    """A Config field. `flags` and `off` are space-separated spellings. Secrets and keys are left
    out of repr."""
    names = tuple(flags.split()), tuple(off.split())
    spec = Setting(kind, help, *names, low, high, choices, auto, words or {})
    shown = kind != "keys" and not secret
    return field(default=default, repr=shown, metadata={"setting": spec})


def parse_size(raw: object, place: str) -> int:
    """Parse a size in bytes: 1048576, "8GiB", "500 MB", "1.5G" (K, M, G, T are powers of 1024)."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    text = raw.strip() if isinstance(raw, str) else ""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f'{place} must be a size such as 8GiB or 500MB, not "{raw}".')
    return int(float(found[1]) * UNITS[found[2].upper()]) if found[2] else _int(found[1], place)


def _int(raw: object, place: str) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    try:
        return int(raw.strip() if isinstance(raw, str) else "")
    except ValueError:
        raise _wrong(raw, place, "a whole number") from None


def _float(raw: object, place: str) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    try:
        return float(raw if isinstance(raw, str) else "")
    except ValueError:
        raise _wrong(raw, place, "a number") from None


def _bool(raw: object, place: str) -> bool:
    if isinstance(raw, bool):
        return raw
    word = raw.strip().lower() if isinstance(raw, str) else ""
    if word in YES or word in NO:
        return word in YES
    raise _wrong(raw, place, "true or false")


def _text(raw: object, place: str) -> str:
    if isinstance(raw, Path):
        return str(raw)
    if not isinstance(raw, str):
        raise _wrong(raw, place, "text")
    return raw


def parse_path(raw: object, place: str) -> Path:
    """A path, in which `~` is the home of the user. Raises ConfigError."""
    text = _text(raw, place)
    if not text or "\0" in text:
        raise ConfigError(f"{place} must be a path.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{place} is in a home folder that is not known: {text}.") from None


def _list(raw: object, place: str) -> tuple[str, ...]:
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        raise _wrong(raw, place, "a list of texts")
    return tuple(part.strip() for item in items for part in _text(item, place).split(",") if part)


def _args(raw: object, place: str) -> tuple[str, ...]:
    """Words of a command line: a list of them, or text split as a shell does."""
    if isinstance(raw, list | tuple):
        return tuple(_text(item, place) for item in raw)
    try:
        return tuple(shlex.split(_text(raw, place)))
    except ValueError as error:
        raise ConfigError(f"{place} is not a command line: {error}.") from None


def _keys(raw: object, place: str) -> tuple[tuple[str, str], ...]:
    """(key, tenant) pairs from "key" or "tenant:key" texts. No message repeats a key."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{place} must be a list of keys.")
    return keys_from((part for item in items for part in item.split(",")), place)


def keys_from(lines: Iterable[str], place: str) -> tuple[tuple[str, str], ...]:
    """(key, tenant) pairs of `lines`, blank ones skipped. Raises ConfigError."""
    tenants: dict[str, str] = {}
    for line in lines:
        tenant, colon, key = line.strip().rpartition(":")
        if not colon:
            tenant = LOCAL_TENANT
        if not key and not colon:
            continue
        if not key:
            raise ConfigError(f"{place} has a tenant without a key.")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant) or tenant == PUBLIC_TENANT:
            raise ConfigError(
                f"{place} names a tenant that is not 1 to 64 letters, digits, '.', '_' or '-', "
                f"or is the reserved '{PUBLIC_TENANT}'."
            )
        if tenants.setdefault(key, tenant) != tenant:
            raise ConfigError(f"{place} gives one key to two tenants.")
    return tuple(tenants.items())


def _wrong(raw: object, place: str, wanted: str) -> ConfigError:
    return ConfigError(f"{place} must be {wanted}, not {raw!r}.")


_PARSERS: dict[Kind, Callable[[object, str], Any]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "text": _text,
    "path": parse_path,
    "size": parse_size,
    "list": _list,
    "args": _args,
    "keys": _keys,
}
