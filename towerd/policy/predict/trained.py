"""A trained predictor as the daemon asks it: by name of an agent, whichever tenant's it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from towerd.policy.predict.base import END, Forecast, Predictor
from towerd.policy.predict.fallback import Fallback
from towerd.policy.predict.markov import Markov
from towerd.policy.predict.mixture import Mixture
from towerd.policy.predict.mixture_file import load as load_mixture

_MARK = "\n"
"""Between tenant and agent in the names that policies hear."""


class Trained:
    """Learned names are plain; what a forecast names belongs to the tenant that is asked about."""

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
