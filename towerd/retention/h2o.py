"""H2O: heavy hitters by accumulated attention, and the last tokens (Zhang et al. 2023, "H2O:
Heavy-Hitter Oracle for Efficient Generative Inference", Algorithm 1).

The paper evicts one token for each new one, per head; this evicts as many as necessary at once, and
a position for all heads. Half of the budget goes to the last tokens, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from towerd.retention.base import Indices, Retention, RetentionConfig, Signal, View, top


@dataclass(frozen=True, slots=True)
class H2OConfig(RetentionConfig):
    """The paper has no sink, its first tokens being heavy hitters; `sink=0` is its form."""


class H2O(Retention):
    """Keeps the sink, the window, and of the rest what got the most attention so far."""

    signals = frozenset((Signal.MASS,))

    def _choose(self, view: View, span: slice, room: int) -> Indices:
        assert view.mass is not None
        return top(view.mass[span], room)
