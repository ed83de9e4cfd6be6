"""H2O: heavy hitters by accumulated attention, and the last tokens (Zhang et al. 2023, "H2O:
Heavy-Hitter Oracle for Efficient Generative Inference", Algorithm 1).

The paper evicts one token for each new one; this evicts as many as necessary at once. Half of the budget
goes to the last tokens, as in the paper. All queries count, but the sum of what the text itself looked at
buries what was asked about it, so attention fades; and what stays has its neighbours, as in SnapKV.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from towerd.retention.base import (
    HALF_LIFE_DEFAULT,
    POOL_DEFAULT,
    Indices,
    Retention,
    RetentionConfig,
    Signal,
    View,
    check_pool,
    pooled,
    top,
)


@dataclass(frozen=True, slots=True)
class H2OConfig(RetentionConfig):
    """The paper has no sink, its first tokens being heavy hitters; its attention does not fade, and it has
    no pooling: `sink=0, half_life=math.inf, pool=1` is its form."""

    half_life: float = field(default=HALF_LIFE_DEFAULT, kw_only=True)
    pool: int = POOL_DEFAULT
    """Width of the max pooling over neighbours, odd."""

    def __post_init__(self) -> None:
        RetentionConfig.__post_init__(self)
        check_pool(self.pool)


class H2O(Retention):
    """Keeps the sink, the window, and of the rest the neighbourhoods that got the most attention."""

    signals = frozenset((Signal.MASS,))

    config: H2OConfig

    def _choose(self, view: View, span: slice, room: int) -> Indices:
        assert view.mass is not None
        return top(pooled(view.mass[span], self.config.pool), room)
