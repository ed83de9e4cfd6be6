"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from towerd.errors import ConfigError
from towerd.policy.base import Policy
from towerd.policy.lru import LRU

_POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU}
NAMES = tuple(sorted(_POLICIES))


def make_policy(name: str) -> Policy:
    """A fresh policy. Raises ConfigError for a name that is not in NAMES."""
    maker = _POLICIES.get(name)
    if maker is None:
        raise ConfigError(f"there is no policy {name!r}; choose one of: {', '.join(NAMES)}")
    return maker()
