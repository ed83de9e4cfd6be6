"""SnapKV: what the last queries looked at, with its neighbours (Li et al. 2024, "SnapKV: LLM Knows
What You are Looking for Before Generation", section 4 and its listing).

The paper votes once, at the end of the prompt and per head; this votes at each eviction and for all
heads. The window is the observation window: its queries vote, its tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from towerd.retention.base import Mass, Positions, Signal, View, check_view
from towerd.retention.choice import SINK_DEFAULT, EndsConfig, middle, top, with_ends

_WINDOW_MAX = 32


@dataclass(frozen=True, slots=True)
class SnapKVConfig(EndsConfig):
    """The paper has no sink; `sink=0` is its form."""

    window: int = _WINDOW_MAX
    pool: int = 7
    """Width of the max pooling over neighbours, odd."""

    def __post_init__(self) -> None:
        EndsConfig.__post_init__(self)
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(
                f"a pooling over {self.pool} neighbours has no middle: take an odd one"
            )

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        return cls(window=min(_WINDOW_MAX, (budget - SINK_DEFAULT) // 2))


class SnapKV:
    """Keeps the sink, the window, and the neighbourhoods that the window's queries attend to."""

    signals = frozenset((Signal.RECENT,))
    can_recall = False

    def __init__(self, config: SnapKVConfig) -> None:
        self.config = config

    def keep(self, view: View, n_max: int) -> Positions:
        check_view(self, view, n_max)
        assert view.recent is not None
        if view.n <= n_max:
            return view.positions
        span = middle(view.n, self.config.sink, self.config.window)
        votes = pooled(view.recent[span], self.config.pool)
        return with_ends(view.positions, span, top(votes, n_max - self.config.n_min))

    def truncate(self, n: int) -> None:
        """Does nothing: the policy is stateless."""

    def fork(self) -> Self:
        return self


def pooled(scores: Mass, width: int) -> Mass:
    """float32[n]: the maximum over a window of `width` around each score, cut off at the ends."""
    if not len(scores):
        return scores
    padded = np.pad(scores, width // 2, constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    return np.asarray(windows.max(axis=1), np.float32)
