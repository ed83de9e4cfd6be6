"""ConnectorSettings: what vLLM's `kv_connector_extra_config` says to the connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from towerd.errors import ConfigError
from towerd.settings.config import HOT_BYTES, WARM_BYTES_MAX
from towerd.settings.setting import parse_size
from towerd.slots.layout import NATIVE
from towerd.system.machine import free_bytes
from towerd.tiers.formats.fidelity import check_format

PREFIX = "towerd."
NAMES = ("store_dir", "format", "format_after_s", "hot_bytes", "warm_bytes", "shared", "shared_key")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Checked settings; docs/vllm.md describes them."""

    store_dir: Path
    format: str
    """`native`, or the stored format of rows that were not used for `format_after_s`."""
    format_after_s: float
    hot_bytes: int
    warm_bytes: int
    shared: str | None
    shared_key: Path | None

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Those of an extra config; keys without the prefix are another connector's. Raises ConfigError."""
        given = {
            key[len(PREFIX) :]: value for key, value in extra.items() if key.startswith(PREFIX)
        }
        if unknown := sorted(set(given) - set(NAMES)):
            known = ", ".join(PREFIX + name for name in NAMES)
            raise ConfigError(
                f"{PREFIX}{unknown[0]} is no setting of the connector; it has {known}."
            )
        store_dir = _path(given, "store_dir")
        if store_dir is None:
            raise ConfigError(
                f"Say with {PREFIX}store_dir in which folder the connector's store is."
            )
        name = str(given.get("format", NATIVE))
        check_format(name, PREFIX + "format")
        shared = given.get("shared")
        if shared is not None and not (isinstance(shared, str) and urlsplit(shared).scheme):
            raise ConfigError(f"{PREFIX}shared must be a URL such as s3://BUCKET/PREFIX.")
        return cls(
            store_dir,
            name,
            _seconds(given.get("format_after_s", 600.0)),
            _size(given, "hot_bytes", HOT_BYTES),
            _size(given, "warm_bytes", min(WARM_BYTES_MAX, free_bytes(store_dir) // 2)),
            shared,
            _path(given, "shared_key"),
        )


def _path(given: Mapping[str, Any], name: str) -> Path | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{PREFIX}{name} must be a path.")
    return Path(value).expanduser().absolute()


def _size(given: Mapping[str, Any], name: str, default: int) -> int:
    n_bytes = parse_size(given.get(name, default), PREFIX + name)
    if n_bytes < 0:
        raise ConfigError(f"{PREFIX}{name} must not be negative.")
    return n_bytes


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigError(f"{PREFIX}format_after_s must be a number of seconds, 0 or more.")
    return float(value)
