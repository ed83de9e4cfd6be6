"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from towerd.errors import ConfigError
from towerd.policy.base import Policy
from towerd.policy.foresight import Foresight
from towerd.policy.gdsf import GDSF
from towerd.policy.kvflow import KVFlow
from towerd.policy.latem_tree import LatemTree
from towerd.policy.lindy import Lindy
from towerd.policy.lru import LRU
from towerd.policy.pbkv import PBKV
from towerd.policy.sieve import Sieve

_POLICIES: dict[str, Callable[[], Policy]] = {
    "foresight": Foresight,
    "gdsf": GDSF,
    "kvflow": KVFlow,
    "latem": LatemTree,
    "lindy": Lindy,
    "lru": LRU,
    "pbkv": PBKV,
    "sieve": Sieve,
}
NAMES = tuple(sorted(_POLICIES))


def make_policy(name: str) -> Policy:
    """A fresh policy. Raises ConfigError for a name that is not in NAMES."""
    maker = _POLICIES.get(name)
    if maker is None:
        raise ConfigError(f"there is no policy {name!r}; choose one of: {', '.join(NAMES)}")
    return maker()
