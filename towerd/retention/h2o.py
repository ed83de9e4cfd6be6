"""H2O: heavy hitters by accumulated attention, and the last tokens (Zhang et al. 2023, "H2O:
Heavy-Hitter Oracle for Efficient Generative Inference", Algorithm 1).

The paper evicts one token for each new one, per head; this evicts as many as necessary at once, and
a position for all heads. Half of the budget goes to the last tokens, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from towerd.retention.base import Positions, Signal, View, check_view
from towerd.retention.choice import EndsConfig, middle, top, with_ends


@dataclass(frozen=True, slots=True)
class H2OConfig(EndsConfig):
    """The paper has no sink, its first tokens being heavy hitters; `sink=0` is its form."""


class H2O:
    """Keeps the sink, the window, and of the rest what got the most attention so far."""

    signals = frozenset((Signal.MASS,))
    can_recall = False

    def __init__(self, config: H2OConfig) -> None:
        self.config = config

    def keep(self, view: View, n_max: int) -> Positions:
        check_view(self, view, n_max)
        assert view.mass is not None
        if view.n <= n_max:
            return view.positions
        span = middle(view.n, self.config.sink, self.config.window)
        return with_ends(view.positions, span, top(view.mass[span], n_max - self.config.n_min))

    def truncate(self, n: int) -> None:
        """Does nothing: the policy is stateless."""

    def fork(self) -> Self:
        return self
