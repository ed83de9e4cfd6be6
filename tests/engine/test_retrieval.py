"""A key told long ago in a chat: who finds it again, on the real engine with the model that can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from oracle import ask, settle
from services import EmbeddedService, OpenService

from lab.texts.tasks import passkey
from lab.texts.tokenizer import TextTokenizer
from towerd.codec.prior import sample
from towerd.engine.base import LiveBudget
from towerd.models.bundled import RETRIEVAL_NAME, bundled_model
from towerd.tokens import Ids

N_CHAT = 2000
BUDGET = 256
FULL = LiveBudget()
ICECACHE = LiveBudget("icecache", BUDGET)
STREAMING = LiveBudget("streaming", BUDGET)
DEPTHS = (0.05, 0.3, 0.6, 0.85)
SETTINGS = {"ctx_size": 4096, "live_tokens": 8192, "threads": 1, "retention": "icecache"}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[TextTokenizer]:
    with TextTokenizer(bundled_model(RETRIEVAL_NAME)) as made:
        yield made


async def said(
    service: EmbeddedService, tokenizer: TextTokenizer, live: LiveBudget, depth: float
) -> tuple[str, str]:
    """(the key that was told at `depth` of a chat, what is answered when its next turn asks)."""
    seed = int(100 * depth)
    fact = passkey(np.random.default_rng(seed))
    told, asked = tokenizer.ids(fact.text), tokenizer.ids(fact.question)
    text = tokenizer.windows(sample.load().decode(), 8, N_CHAT - len(told))[seed % 8]
    at = max(1, int(depth * len(text)))
    chat: Ids = np.concatenate([text[:at], told, text[at:]]).astype(np.int32)
    scope = f"{live.policy} {depth}"
    first = await ask(service, chat, 4, live=live, scope=scope)
    chat = np.concatenate([chat, np.array(first.ids), asked]).astype(np.int32)
    answer = await ask(service, chat, len(fact.answer), live=live, scope=scope)
    if live.is_bounded:
        assert answer.finish.reuse.kept is not None
        assert answer.finish.reuse.kept <= BUDGET
    return fact.answer, answer.text


@pytest.mark.parametrize(
    ("layer_step", "scope"), [(1, "all"), (3, "all"), (3, "layer"), (3, "head")]
)
async def test_what_left_the_context_is_found_again(
    service_on: OpenService, tokenizer: TextTokenizer, layer_step: int, scope: str
) -> None:
    """With 256 of 2,000 tokens live, IceCache brings the key back from wherever it was told."""
    settings = {**SETTINGS, "recall_layer_step": layer_step}
    live = replace(ICECACHE, scope=scope)
    async with service_on(bundled_model(RETRIEVAL_NAME), **settings) as service:
        for depth in DEPTHS:
            key, answer = await said(service, tokenizer, live, depth)
            assert answer == key, depth
        await settle(service)


async def test_what_a_window_has_lost(service_on: OpenService, tokenizer: TextTokenizer) -> None:
    """The full cache has the key; the first and the last 256 tokens do not."""
    async with service_on(bundled_model(RETRIEVAL_NAME), **SETTINGS) as service:
        for depth in DEPTHS:
            key, answer = await said(service, tokenizer, FULL, depth)
            assert answer == key, depth
            key, answer = await said(service, tokenizer, STREAMING, depth)
            assert answer != key, depth
