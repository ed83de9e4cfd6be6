"""Policies by name."""

from __future__ import annotations

import importlib

from towerd.errors import ConfigError
from towerd.policy.base import Policy

_POLICIES = {  # imported when one is made: some need numpy, and --help has to be quick
    "foresight": "towerd.policy.foresight:Foresight",
    "gdsf": "towerd.policy.gdsf:GDSF",
    "kvflow": "towerd.policy.kvflow:KVFlow",
    "latem": "towerd.policy.latem_tree:LatemTree",
    "lindy": "towerd.policy.lindy:Lindy",
    "lru": "towerd.policy.lru:LRU",
    "pbkv": "towerd.policy.pbkv:PBKV",
    "sieve": "towerd.policy.sieve:Sieve",
}
NAMES = tuple(sorted(_POLICIES))


def make_policy(name: str) -> Policy:
    """A fresh policy. Raises ConfigError for a name that is not in NAMES."""
    where = _POLICIES.get(name)
    if where is None:
        raise ConfigError(f"there is no policy {name!r}; choose one of: {', '.join(NAMES)}")
    module, attribute = where.split(":")
    policy: Policy = getattr(importlib.import_module(module), attribute)()
    return policy
