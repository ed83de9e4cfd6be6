"""Policies by name."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path

from towerd.errors import ConfigError
from towerd.policy.base import Policy, Tree
from towerd.policy.predict.base import Predictor

_POLICIES = {  # imported when one is made: some need numpy, and --help has to be quick
    "foresight": "towerd.policy.foresight:Foresight",
    "lru": "towerd.policy.base:LRU",
    "pbkv": "towerd.policy.pbkv:PBKV",
}
NAMES: Collection[str] = _POLICIES.keys()
"""Includes what was registered since."""
_PREDICTING = ("foresight", "pbkv")


def register(name: str, where: str) -> None:
    """Add a policy to those that this process can make. where: `module:attribute`, called with a
    Tree. To be called before anything else of the daemon is imported: its options list the names."""
    _POLICIES[name] = where


def make_policy(name: str, tree: Tree, predictor: Path | None = None) -> Policy:
    """A fresh policy over `tree`. predictor: a file of `towerctl train predictor`, which is used
    while it is right often enough; then the Markov model is, then none. Raises ConfigError for a
    name that is not in NAMES, a policy that uses no predictor, and a file that is not a
    predictor."""
    where = _POLICIES.get(name)
    if where is None:
        raise ConfigError(f"there is no policy {name!r}; choose one of: {', '.join(NAMES)}")
    module, attribute = where.split(":")
    make = getattr(importlib.import_module(module), attribute)
    loaded = () if predictor is None else (load_predictor(name, predictor),)
    policy: Policy = make(tree, *loaded)
    return policy


def load_predictor(name: str, predictor: Path) -> Predictor:
    """The predictor of a file, for the policy `name`, with Markov and then none as fallbacks. Raises
    ConfigError."""
    if name not in _PREDICTING:
        raise ConfigError(
            f"the policy {name} uses no predictor; choose one of: {', '.join(_PREDICTING)}"
        )
    # imported late: numpy
    from towerd.policy.predict.fallback import Fallback
    from towerd.policy.predict.markov import Markov
    from towerd.policy.predict.mixture import Mixture, Trained
    from towerd.policy.predict.mixture_file import load
    from towerd.policy.predict.tenants import TenantPredictors

    trained = Trained(Mixture(load(predictor)))
    return TenantPredictors(lambda share: Fallback([trained, Markov(share=share)], share))
