"""Retention policies by name, imported on first use: most daemons need none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from towerd.retention.base import Retention, RetentionConfig

_CLASSES: Mapping[str, tuple[str, str]] = {
    "streaming": ("StreamingConfig", "Streaming"),
    "h2o": ("H2OConfig", "H2O"),
    "snapkv": ("SnapKVConfig", "SnapKV"),
    "buzz": ("BuzzConfig", "Buzz"),
    "latem": ("LatemConfig", "Latem"),
    "icecache": ("IceCacheConfig", "IceCache"),
}
"""Parameters and policy in the module `towerd.retention.NAME`."""
NAMES = tuple(_CLASSES)


@cache
def _classes(name: str) -> tuple[type[RetentionConfig], type[Retention]]:
    """The classes of policy `name`. Raises KeyError for an unknown name."""
    config, policy = _CLASSES[name]
    module = import_module(f"towerd.retention.{name}")
    return getattr(module, config), getattr(module, policy)


def retention_config(name: str, budget: int) -> RetentionConfig:
    """The parameters of policy `name` for `budget` live tokens. Raises ValueError for an unknown
    name or a budget that leaves nothing beside sink and window."""
    if name not in _CLASSES:
        raise ValueError(f"there is no retention policy {name!r}: take one of {', '.join(NAMES)}")
    try:
        return _classes(name)[0].for_budget(budget)
    except ValueError as error:
        raise ValueError(f"a budget of {budget} tokens is too small for {name}: {error}") from error


def can_recall(name: str) -> bool:
    """Whether policy `name` may recall what it dropped. Raises KeyError for an unknown name."""
    return _classes(name)[1].can_recall


def open_retention(config: RetentionConfig) -> Retention:
    """A policy with these parameters, for one chat."""
    wanted = type(config).__name__
    for name, (config_class, _) in _CLASSES.items():
        if config_class == wanted:
            make: Callable[[Any], Retention] = _classes(name)[1]
            return make(config)
    raise ValueError(f"no retention policy has parameters of type {wanted}")
