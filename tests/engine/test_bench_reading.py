"""Texts that the benchmark of long chats reads under a budget: as the engine generates them."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import ask, settle, some_ids
from services import OpenService

from lab.bench.longchat.perplexity import ratio
from lab.bench.longchat.reading import last_attention, read
from towerd.engine.base import LiveBudget
from towerd.errors import InvalidRequest
from towerd.models.bundled import bundled_model

N = 200
SETTINGS = {"retention": "h2o", "threads": 1}


@pytest.mark.parametrize(
    "live",
    [LiveBudget(), LiveBudget("streaming", 48), LiveBudget("h2o", 48, "head")],
    ids=["full", "streaming", "h2o"],
)
@pytest.mark.parametrize("n_prompt", [1, 40, 100])
async def test_a_token_is_as_probable_as_when_it_is_generated(
    service_on: OpenService, live: LiveBudget, n_prompt: int
) -> None:
    """What the engine says in a reply has the log-probability that reading it finds, whether the reply
    or the prompt outgrows the budget."""
    n_reply = 60
    async with service_on(bundled_model(), **SETTINGS) as service:
        prompt = some_ids(n_prompt)
        # of another tenant, so that both evaluate the whole prompt: known rows bring no attention
        answer = await ask(service, prompt, n_reply, live=live, scope="other")
        found = await read(service, prompt, np.array(answer.ids), live)
        said = [probs.logprob for probs in answer.probs]
        # one token at a time and many are rounded differently, most so with AMX: 0.0026 was seen
        np.testing.assert_allclose(-found.surprises, said, atol=5e-3)
        n_cells = max(n_prompt, 48) if live.is_bounded else n_prompt + n_reply - 1
        assert found.live.max() <= n_cells
        await settle(service)


async def test_budgets_hold_and_cost_something(service_on: OpenService) -> None:
    """The budget holds for each token of the reply; one as long as the text costs nothing."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        ids = some_ids(N, 3)
        prompt, reply = ids[:120], ids[120:]
        full = await read(service, prompt, reply, LiveBudget())
        assert full.live.tolist() == list(range(120, N))
        whole = await read(service, prompt, reply, LiveBudget("buzz", N + 8))
        assert ratio(whole, full).value == pytest.approx(1, abs=1e-4)
        for name in ("streaming", "buzz", "h2o", "icecache"):
            found = await read(service, prompt, reply, LiveBudget(name, 64, "layer"))
            assert found.live.max() <= 64
            assert (found.aside_bytes > 0) == (name == "icecache")
            assert abs(found.surprises - full.surprises).max() > 0.01
        with pytest.raises(InvalidRequest):
            await read(service, prompt, reply, LiveBudget("streaming", 2))
        await settle(service)


async def test_the_last_queries_and_the_keys_before_them(service_on: OpenService) -> None:
    """Of the same layers and heads, turned to the same places: what is near is attended to."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        keys, queries = await last_attention(service, some_ids(N), 8)
        layers, heads, n_queries, size = queries.shape
        assert keys.shape == (layers, heads // 2, N - 8, size)
        assert n_queries == 8
        scores = queries @ np.repeat(keys, 2, axis=1).swapaxes(2, 3) / np.sqrt(size)
        weights = np.exp(scores - scores.max(-1, keepdims=True)).mean(axis=(0, 1, 2))
        assert weights[-16:].mean() > 3 * weights[:-16].mean()
