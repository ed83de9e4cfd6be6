"""StreamingLLM: the first and the last tokens (Xiao et al. 2024, "Efficient Streaming Language
Models with Attention Sinks").

The first tokens take the attention that a softmax has to put somewhere; a window without them
ruins the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from towerd.retention.base import Positions, Signal, View, check_view
from towerd.retention.choice import EndsConfig, middle, with_ends


@dataclass(frozen=True, slots=True)
class StreamingConfig(EndsConfig):
    """`window` is the fewest last tokens: they get what the sink leaves of the budget."""


class Streaming:
    """Keeps the sink and as many last tokens as fit."""

    signals: frozenset[Signal] = frozenset()
    can_recall = False

    def __init__(self, config: StreamingConfig) -> None:
        self.config = config

    def keep(self, view: View, n_max: int) -> Positions:
        check_view(self, view, n_max)
        if view.n <= n_max:
            return view.positions
        sink = self.config.sink
        return with_ends(view.positions, middle(view.n, sink, n_max - sink), np.array([], np.int64))

    def truncate(self, n: int) -> None:
        """Does nothing: the policy is stateless."""

    def fork(self) -> Self:
        return self
