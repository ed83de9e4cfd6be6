"""StreamingLLM: the first tokens and the last (Xiao et al. 2024, "Efficient Streaming Language
Models with Attention Sinks").

The first tokens take the attention that a softmax has to put somewhere; a window without them
ruins the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from towerd.retention.base import Positions, Signal, View, check_view
from towerd.retention.choice import SINK_DEFAULT, check_ends, middle, with_ends


@dataclass(frozen=True, slots=True)
class StreamingConfig:
    sink: int = SINK_DEFAULT
    window: int = 1
    """The fewest last tokens; what the sink leaves of the budget goes to them."""

    def __post_init__(self) -> None:
        check_ends(self.sink, self.window)

    @property
    def n_min(self) -> int:
        return self.sink + self.window

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        return cls(window=(budget - SINK_DEFAULT) // 2)


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

    def fork(self) -> Self:
        return self
