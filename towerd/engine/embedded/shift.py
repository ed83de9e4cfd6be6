"""Which tokens of a prompt stay when it is longer than its context."""

from __future__ import annotations

import numpy as np

from towerd.engine.base import Ids


def shift_ids(ids: Ids, n_ctx: int, n_keep: int) -> Ids:
    """Keep `n_keep` leading tokens and drop whole half-windows of the oldest after them.

    The dropped amount is a multiple of half the window, so that the turns of one growing chat
    keep the same shortened prefix, and can reuse it, until the next half is dropped."""
    n_keep = max(1, min(n_keep, n_ctx // 2))
    window = n_ctx - n_keep
    block = max(1, window // 2)
    excess = len(ids) - n_ctx + 1
    if excess <= 0:
        return ids
    dropped = min(-(-excess // block) * block, len(ids) - n_keep - 1)
    return np.concatenate([ids[:n_keep], ids[n_keep + dropped :]])
