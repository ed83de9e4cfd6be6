"""StreamingLLM: the first and the last tokens (Xiao et al. 2024, "Efficient Streaming Language
Models with Attention Sinks").

The first tokens take the attention that a softmax has to put somewhere; a window without them
ruins the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from towerd.retention.base import Indices, Retention, RetentionConfig, View


@dataclass(frozen=True, slots=True)
class StreamingConfig(RetentionConfig):
    """`window` is the fewest last tokens: they get what the sink leaves of the budget."""


class Streaming(Retention):
    """Keeps the sink and as many last tokens as fit."""

    def _choose(self, view: View, span: slice, room: int) -> Indices:
        n = span.stop - span.start
        return np.arange(n - room, n, dtype=np.int64)
