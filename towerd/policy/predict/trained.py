"""A trained predictor for the daemon, where an agent's name is prefixed by its tenant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from towerd.policy.predict.base import END, Forecast, Predictor
from towerd.policy.predict.fallback import Fallback
from towerd.policy.predict.markov import Markov
from towerd.policy.predict.mixture import Mixture
from towerd.policy.predict.mixture_file import load as load_mixture

_MARK = "\n"
"""Separates tenant and agent in the names that policies get."""


class Trained:
    """Strips tenants from names before prediction, and adds the tenant of the last step to the
    names of a forecast."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def forecast(self, path: Sequence[str]) -> Forecast:
        """See Predictor.forecast."""
        tenant, mark, _ = path[-1].rpartition(_MARK)
        said = self._predictor.forecast([name.rpartition(_MARK)[2] for name in path])
        return [
            {name if name == END else tenant + mark + name: p for name, p in step.items()}
            for step in said
        ]

    def observe(self, path: Sequence[str]) -> None:
        """See Predictor.observe."""
        self._predictor.observe([name.rpartition(_MARK)[2] for name in path])


def load(path: Path) -> Fallback:
    """Load a predictor file, with Markov and then none as fallbacks. Raises ConfigError."""
    return Fallback([Trained(Mixture(load_mixture(path))), Markov()])
