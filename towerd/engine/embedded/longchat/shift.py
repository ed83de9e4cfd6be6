"""Context shift: a chat that fills its context continues without its oldest turns."""

from __future__ import annotations

import numpy as np

from towerd.engine.base import GenerateRequest
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.restore.branching import Branching
from towerd.engine.embedded.restore.hooks import Hook
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids


class ContextShift(Hook):
    """Drops old tokens of a full context; the kept tail is evaluated again, exactly."""

    may_outgrow = True

    def __init__(self, branching: Branching, tiers: Tiers) -> None:
        super().__init__(branching)
        self._tiers = tiers

    def shorten(self, job: Job, n_ctx: int) -> None:
        if job.n < n_ctx:
            return
        job.ids = shift_ids(job.ids, n_ctx, self.n_keep(job.request))
        job.n_prompt = min(job.n_prompt, len(job.ids))
        job.truncated = True

    def restarts_shortened(self, job: Job) -> bool:
        return True

    def n_keep(self, request: GenerateRequest) -> int:
        """How many leading tokens are kept: as the request says, else those of its base."""
        if request.n_keep < 0:
            return len(request.ids)
        return request.n_keep or self._tiers.base_tokens(request.ids, request.scope)


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
