"""Choosing among positions: ends that always stay, and the best of the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from towerd.retention.base import Mass, Positions

Indices = npt.NDArray[np.int64]

SINK_DEFAULT = 4
"""First tokens that always stay: StreamingLLM found four to be enough, BUZZ uses one to five."""


def check_ends(sink: int, window: int) -> None:
    """Raises ValueError for a negative sink or an empty window."""
    if sink < 0 or window < 1:
        raise ValueError(
            f"a sink of {sink} and a window of {window} tokens: the sink cannot be negative, "
            "and the last token always stays"
        )


@dataclass(frozen=True, slots=True)
class EndsConfig:
    """Parameters of a policy that always keeps the first and the last tokens."""

    sink: int = SINK_DEFAULT
    window: int = 1

    def __post_init__(self) -> None:
        check_ends(self.sink, self.window)

    @property
    def n_min(self) -> int:
        """The fewest positions that stay."""
        return self.sink + self.window

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        """Gives half of what the sink leaves to the window. Raises ValueError for too few."""
        return cls(window=(budget - SINK_DEFAULT) // 2)


def middle(n: int, sink: int, window: int) -> slice:
    """The indices between the first `sink` and the last `window` of n; the window comes first."""
    stop = max(0, n - window)
    return slice(min(sink, stop), stop)


def top(scores: Mass, k: int) -> Indices:
    """Indices of the k largest scores, ascending; the later on ties."""
    order = np.lexsort((np.arange(len(scores)), scores))
    return np.sort(order[max(0, len(scores) - k) :]).astype(np.int64)


def with_ends(positions: Positions, span: slice, chosen: Indices) -> Positions:
    """The positions before and after `span`, and the chosen indices within it, ascending."""
    return np.concatenate(
        [positions[: span.start], positions[span][chosen], positions[span.stop :]]
    )
