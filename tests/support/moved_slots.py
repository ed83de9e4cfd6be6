"""A prompt that changed in the middle in the slots of a llama-server, and what of it is moved."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from moved import ANYTHING
from oracle import Answer, TokenProbs
from sidecar_tools import Sidecar, ask, prompt

from towerd.engine.base import Finish
from towerd.tiers.moved_limits import BLOCK_TOKENS, MovedLimits, block_offsets
from towerd.tokens import Ids

NOISE = 0.01
"""What log-probabilities over the same rows may differ by, without flash attention on both sides."""
N_RUN = 300
HEAD, OLD, NEW = prompt(20, 1), prompt(30, 2), prompt(45, 3)
RUN, REST = prompt(N_RUN, 4), prompt(9, 5)
BEFORE, AFTER = np.concatenate([HEAD, OLD, RUN]), np.concatenate([HEAD, NEW, RUN, REST])
N_CHECKED = BLOCK_TOKENS * len(block_offsets(N_RUN))
N_MOVED = N_RUN - N_CHECKED
MOVED_FROM = len(HEAD) + len(NEW) + BLOCK_TOKENS
"""Where the first moved row of AFTER is: the run's first tokens are evaluated again."""


def allow(sidecar: Sidecar, limits: MovedLimits = ANYTHING) -> None:
    """Set what deviations have to stay under."""
    assert sidecar.engine.why_not_movable == ""
    sidecar.tiers.moved_limits = limits


async def moved(sidecar: Sidecar) -> Finish:
    """A reply from moved rows, and what it was made of."""
    allow(sidecar)
    await ask(sidecar, BEFORE)
    _, done = await ask(sidecar, AFTER)
    assert done.reuse.moved == N_MOVED
    return done


async def settled(sidecar: Sidecar) -> None:
    await sidecar.engine.settle()
    await asyncio.to_thread(sidecar.tiers.flush)


def whole(done: Finish) -> Ids:
    """AFTER and its reply."""
    return np.concatenate([AFTER, np.array(done.ids, np.int32)])


def values(sidecar: Sidecar, ids: Ids) -> np.ndarray:
    """The last layer's values of the stored rows of `ids`, uint8[n, row_bytes]."""
    plan = sidecar.tiers.plan(sidecar.store.hold(ids, "local"), 0)
    assert plan.n == len(ids)
    return np.concatenate([rows.token_major().v[-1] for _, rows in sidecar.tiers.rows(plan)])


def n_same(sidecar: Sidecar, ids: Ids, at: int) -> int:
    """How many stored rows of the run that begins at `at` in `ids` are those of BEFORE."""
    old, new = values(sidecar, BEFORE)[-N_RUN:], values(sidecar, ids)[at : at + N_RUN]
    return int((new == old).all(axis=1).sum())


async def probabilities(sidecar: Sidecar, ids: Ids, n_min: int) -> Answer:
    """A reply in a slot that the engine prepared for it, with its log-probabilities."""
    async with await sidecar.engine.holds.hold(ids, "local", run_tokens_min=n_min) as hold:
        body: dict[str, Any] = {"prompt": ids, "id_slot": hold.slot, "n_predict": 8, "n_probs": 2}
        body |= {"temperature": 0.0, "ignore_eos": True}
        said = await sidecar.engine.upstream.post("/completion", body)
        assert said["timings"]["cache_n"] >= hold.reuse.moved
    probs = [TokenProbs(p["id"], p["logprob"], {}) for p in said["completion_probabilities"]]
    return Answer([each.id for each in probs], probs, Finish("limit", "", (), 0, None, None), "")  # type: ignore[arg-type]
