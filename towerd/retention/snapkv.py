"""SnapKV: what the last queries looked at, with its neighbours (Li et al. 2024, "SnapKV: LLM Knows
What You are Looking for Before Generation", section 4 and its listing).

The paper votes once, at the end of the prompt and per head; this votes at each eviction and for all
heads. The window is the observation window: its queries vote, its tokens stay. Pooling is wider than the
paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from towerd.retention.base import (
    POOL_DEFAULT,
    SINK_DEFAULT,
    Indices,
    Retention,
    RetentionConfig,
    Signal,
    View,
    check_pool,
    pooled,
    top,
)

_WINDOW_MAX = 32
_BUDGET_PER_QUERY = 16
"""In a small budget a long window takes the room of what it votes for, and its first queries outvote the last."""


@dataclass(frozen=True, slots=True)
class SnapKVConfig(RetentionConfig):
    """The paper has no sink; `sink=0` is its form."""

    window: int = _WINDOW_MAX
    pool: int = POOL_DEFAULT
    """Width of the max pooling over neighbours, odd."""

    def __post_init__(self) -> None:
        RetentionConfig.__post_init__(self)
        check_pool(self.pool)

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        room = (budget - SINK_DEFAULT) // 2
        return cls(window=min(_WINDOW_MAX, max(1, budget // _BUDGET_PER_QUERY), room))


class SnapKV(Retention):
    """Keeps the sink, the window, and the neighbourhoods that the window's queries attend to."""

    signals = frozenset((Signal.RECENT,))

    config: SnapKVConfig

    def _choose(self, view: View, span: slice, room: int) -> Indices:
        assert view.recent is not None
        return top(pooled(view.recent[span], self.config.pool), room)
