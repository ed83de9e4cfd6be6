"""Texts that the benchmark of long chats reads under a budget: as the scheduler evaluates them."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import ask, settle, some_ids
from services import OpenService

from lab.bench.longchat.perplexity import live_by_token, ratio
from lab.bench.longchat.reading import last_attention, read
from towerd.engine.base import LiveBudget
from towerd.errors import InvalidRequest
from towerd.models.bundled import bundled_model

N = 200
SETTINGS = {"retention": "h2o", "threads": 1}


@pytest.mark.parametrize("live", [LiveBudget(), LiveBudget("streaming", 48), LiveBudget("h2o", 48)])
async def test_a_token_is_as_probable_as_when_it_is_generated(
    service_on: OpenService, live: LiveBudget
) -> None:
    """What the engine says while a reply outgrows the budget has the log-probability that reading it
    finds."""
    n_prompt, n_reply = 40, 30
    async with service_on(bundled_model(), **SETTINGS) as service:
        ids = some_ids(n_prompt)
        answer = await ask(service, ids, n_reply, live=live)
        whole = np.concatenate([ids, np.array(answer.ids, np.int32)])
        found = await read(service.engine, whole, live)
        said = [probs.logprob for probs in answer.probs]
        np.testing.assert_allclose(-found.surprises[n_prompt - 1 :], said, atol=2e-3)
        assert found.live.max() == (48 if live.is_bounded else n_prompt + n_reply)
        await settle(service)


async def test_budgets_hold_and_cost_something(service_on: OpenService) -> None:
    """Each token sees as many as the policy leaves; a budget as long as the text costs nothing."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        ids = some_ids(N, 3)
        full = await read(service.engine, ids, LiveBudget())
        assert full.live.tolist() == list(range(1, N + 1))
        whole = await read(service.engine, ids, LiveBudget("buzz", N + 8))
        assert ratio(whole, full).value == pytest.approx(1, abs=1e-4)
        for name in ("streaming", "buzz", "h2o", "icecache"):
            found = await read(service.engine, ids, LiveBudget(name, 64))
            assert found.live.max() == 64
            if name != "icecache":  # which needs keys to choose by
                expected = live_by_token(LiveBudget(name, 64), N)
                assert found.live.tolist() == expected.tolist(), name
            assert found.surprises[:63].tolist() == pytest.approx(full.surprises[:63], abs=1e-3)
            assert abs(found.surprises[64:] - full.surprises[64:]).max() > 0.01
        with pytest.raises(InvalidRequest):
            await read(service.engine, ids, LiveBudget("streaming", 2))
        await settle(service)


async def test_the_last_queries_and_the_keys_before_them(service_on: OpenService) -> None:
    """Of the same layers and heads, turned to the same places: what is near is attended to."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        keys, queries = await last_attention(service.engine, some_ids(N), 8)
        layers, heads, n_queries, size = queries.shape
        assert keys.shape == (layers, heads // 2, N - 8, size)
        assert n_queries == 8
        scores = queries @ np.repeat(keys, 2, axis=1).swapaxes(2, 3) / np.sqrt(size)
        weights = np.exp(scores - scores.max(-1, keepdims=True)).mean(axis=(0, 1, 2))
        assert weights[-16:].mean() > 3 * weights[:-16].mean()
