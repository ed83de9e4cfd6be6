"""Policies by name: those of the daemon, and those that only a replay runs."""

from __future__ import annotations

from collections.abc import Callable

from lab.policies.gdsf import GDSF
from lab.policies.kvflow import KVFlow
from lab.policies.latem import LatemTree
from lab.policies.lindy import Lindy
from lab.policies.sieve import Sieve
from towerd import policy as product
from towerd.errors import ConfigError

_RIVALS: dict[str, Callable[[product.Tree], product.Policy]] = {
    "gdsf": GDSF,
    "kvflow": KVFlow,
    "latem": LatemTree,
    "lindy": Lindy,
    "sieve": Sieve,
}
NAMES = tuple(sorted((*product.NAMES, *_RIVALS)))


def make_policy(name: str, tree: product.Tree) -> product.Policy:
    """A fresh policy over `tree`. Raises ConfigError for a name that is not in NAMES."""
    if name not in NAMES:
        raise ConfigError(f"there is no policy {name!r}; choose one of: {', '.join(NAMES)}")
    rival = _RIVALS.get(name)
    return product.make_policy(name, tree) if rival is None else rival(tree)
