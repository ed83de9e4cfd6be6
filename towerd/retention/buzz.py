"""BUZZ: one heavy hitter of each segment (Zhao et al. 2024, "BUZZ: Beehive-structured Sparse KV
Cache with Segmented Heavy Hitters", Algorithms 1 and 2, Theorem 3.1, section 3.5).

    [ sink k ][ old: every s^-th stays ][ new: of every s the one with most attention ][ window w ]

A position is new until it has survived an eviction. Tokens accumulate until sink, middle and window
reach k + T + w, which is the budget. The sample takes a part of the room, and the others with most attention,
with their neighbours, take the rest; in the paper the sample takes all of it, and what it leaves stays
empty until new tokens come. Attention fades, as in H2O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from towerd.retention.base import (
    HALF_LIFE_DEFAULT,
    POOL_DEFAULT,
    SINK_DEFAULT,
    Indices,
    Mass,
    Retention,
    RetentionConfig,
    Signal,
    View,
    check_pool,
    pooled,
    top,
)


@dataclass(frozen=True, slots=True)
class BuzzConfig(RetentionConfig):
    """`sink` is the paper's k, `window` its w; its attention does not fade (`half_life=math.inf`)."""

    half_life: float = field(default=HALF_LIFE_DEFAULT, kw_only=True)
    threshold: int = 1
    """T: tokens between sink and window, old ones included, at which an eviction is due."""
    stride: int = 5
    """s, for new tokens. With 1 or 2 every old token would stay: the cache would never shrink."""
    sampled_part: int = 4
    """One of so many tokens between sink and window is sampled, the others are those with most attention; 1
    is the paper's."""
    pool: int = POOL_DEFAULT
    """Width of the max pooling over neighbours of what is not sampled, odd."""

    def __post_init__(self) -> None:
        RetentionConfig.__post_init__(self)
        check_pool(self.pool)
        if self.stride < 3 or self.threshold < 1 or self.sampled_part < 1:
            raise ValueError(
                "BUZZ needs a stride of at least 3, a threshold and a part of at least 1"
            )

    @property
    def stride_old(self) -> int:
        """s^, for tokens that survived an eviction."""
        return (self.stride + 1) // 2

    @property
    def budget(self) -> int:
        """The most tokens that are ever live."""
        return self.sink + self.threshold + self.window

    @classmethod
    def for_budget(cls, budget: int, stride: int = 5) -> Self:
        """T / w is the paper's, `threshold_per_window`."""
        window = max(1, int((budget - SINK_DEFAULT) / (1 + threshold_per_window(stride))))
        threshold = budget - SINK_DEFAULT - window
        if threshold < 1:
            raise ValueError(f"BUZZ needs a budget of at least {SINK_DEFAULT + 2} tokens")
        return cls(window=window, threshold=threshold, stride=stride)


def threshold_per_window(stride: int) -> float:
    """T / w at which the number of old tokens converges to w (Theorem 3.1).

    The theorem's two cases are right; its proof labels them the wrong way round."""
    return (stride**2 + 1) / (stride + 1) if stride % 2 else stride - 1.0


class Buzz(Retention):
    """Samples old and new tokens; remembers where new tokens begin."""

    signals = frozenset((Signal.MASS,))

    config: BuzzConfig

    def __init__(self, config: BuzzConfig) -> None:
        super().__init__(config)
        self._old_end = 0
        """Positions from here on are new."""

    def _choose(self, view: View, span: slice, room: int) -> Indices:
        assert view.mass is not None
        positions = view.positions[span]
        n_old = int(np.searchsorted(positions, self._old_end))
        new = local_maxima(view.mass[span][n_old:], self.config.stride) + n_old
        kept = np.concatenate([interval_sample(n_old, self.config.stride_old), new])
        n_sampled = room // self.config.sampled_part
        while len(kept) > n_sampled:  # remark 2: until it fits
            kept = (
                kept[interval_sample(len(kept), self.config.stride_old)] if n_sampled else kept[:0]
            )
        others = np.setdiff1d(np.arange(len(positions)), kept, assume_unique=True)
        mass = pooled(view.mass[span], self.config.pool)
        kept = np.union1d(kept, others[top(mass[others], room - len(kept))])
        if len(positions):
            self._old_end = int(positions[-1]) + 1
        return kept.astype(np.int64)

    def truncate(self, n: int) -> None:
        self._old_end = min(self._old_end, n)


def interval_sample(n: int, stride: int) -> Indices:
    """Indices of every stride-th of n, from the first."""
    return np.arange(0, n, stride, dtype=np.int64)


def local_maxima(mass: Mass, stride: int) -> Indices:
    """The index of the largest of every `stride` (Algorithm 2); the first on ties."""
    n = len(mass)
    padded = np.full(-(-n // stride) * stride, -np.inf, np.float32)
    padded[:n] = mass
    rows = padded.reshape(-1, stride)
    return np.asarray(np.arange(len(rows)) * stride + rows.argmax(axis=1), np.int64)
