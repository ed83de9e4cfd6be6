"""A prompt and its context: whether it fits, and which tokens stay when it does not."""

from __future__ import annotations

import numpy as np

from towerd.engine.base import Ids
from towerd.errors import ContextExceeded


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


def check_fits(n_prompt: int, n_ctx: int) -> None:
    """Raises ContextExceeded as llama-server words it."""
    if n_prompt >= n_ctx:
        raise ContextExceeded(
            f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), "
            "try increasing it",
            n_prompt_tokens=n_prompt,
            n_ctx=n_ctx,
        )
