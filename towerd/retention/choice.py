"""Choosing among positions: ends that always stay, and the best of the middle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.retention.base import Mass, Positions

Indices = npt.NDArray[np.int64]

SINK_DEFAULT = 4
"""First tokens that always stay: StreamingLLM found four to be enough, BUZZ uses one to five."""


def check_ends(sink: int, window: int) -> None:
    """Raises ValueError for ends that no policy can have."""
    if sink < 0 or window < 1:
        raise ValueError(
            f"a sink of {sink} and a window of {window} tokens: the sink cannot be negative, "
            "and the last token always stays"
        )


def middle(n: int, sink: int, window: int) -> slice:
    """The indices between the first `sink` and the last `window` of n; the window goes first."""
    stop = max(0, n - window)
    return slice(min(sink, stop), stop)


def top(scores: Mass, k: int) -> Indices:
    """Indices of the k largest scores, ascending; of equal ones the later."""
    order = np.lexsort((np.arange(len(scores)), scores))
    return np.sort(order[max(0, len(scores) - k) :]).astype(np.int64)


def with_ends(positions: Positions, span: slice, chosen: Indices) -> Positions:
    """What stands before and after `span`, and the chosen indices within it, ascending."""
    return np.concatenate(
        [positions[: span.start], positions[span][chosen], positions[span.stop :]]
    )
