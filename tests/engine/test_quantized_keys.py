"""Policies that go by attention over quantized keys: llama.cpp's rotation of them, choices, recalls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import ask, check_integrity, settle, some_ids
from services import OpenService

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.live.offloaded_rows import keys_of
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.engine.embedded.longchat.observer import check_attention
from towerd.model.llama_model import LlamaModel
from towerd.retention import Rows
from towerd.retention.attention import rotated
from towerd.settings.config import Config
from towerd.slots.blob import parse_rows


def cached_keys(path: Path, kind: str, head_size: int) -> Rows:
    """The keys of 40 tokens in a cache of this type."""
    config = Config(model=path, cache_type_k=kind, flash_attn="off", threads=1)
    model = LlamaModel(path, config)
    context = LlamaContext(model, config, n_cells=256, n_seqs=1)
    context.batch.add(np.arange(40, dtype=np.int32), 0, 0, logits_last=True)
    context.decode()
    keys = keys_of(parse_rows(context.get_state(0)), head_size)
    context.close()
    model.close()
    return keys


@pytest.mark.parametrize(("kind", "error"), [("q8_0", 0.01), ("q4_0", 0.15)])
def test_a_rotation_is_what_llama_cpp_does(tiny_model: Path, kind: str, error: float) -> None:
    """Cached quantized keys are the rotated keys of a cache of halves, to their precision."""
    plain, quantized = (cached_keys(tiny_model, each, 64) for each in ("f16", kind))
    distance = np.linalg.norm(quantized - rotated(plain, 64))
    assert distance < error * np.linalg.norm(plain)
    assert np.linalg.norm(quantized - plain) > np.linalg.norm(plain)


def test_a_rotation_keeps_products() -> None:
    chance = np.random.default_rng(1)
    a, b = chance.standard_normal((2, 3, 96), dtype=np.float32)
    np.testing.assert_allclose(rotated(a, 32) @ rotated(b, 32).T, a @ b.T, atol=1e-4)
    assert rotated(a, 0) is a


@pytest.mark.parametrize("kind", ["q8_0", "q5_1"])
def test_attention_over_quantized_keys_is_read(tiny_model: Path, kind: str) -> None:
    """Masses agree with llama.cpp's own weights, or this raises."""
    config = Config(model=tiny_model, retention="h2o", cache_type_k=kind, threads=1)
    model = LlamaModel(tiny_model, config)
    try:
        assert check_attention(model, config).hadamard == 64
    finally:
        model.close()


@pytest.mark.parametrize("policy", ["h2o", "icecache"])
@pytest.mark.parametrize("kinds", [("q8_0", "f16"), ("q4_0", "q8_0")])
async def test_chats_with_quantized_keys(
    service_on: OpenService, tiny_model: Path, policy: str, kinds: tuple[str, str]
) -> None:
    """A budget is kept, in every scope, and what icecache drops comes back."""
    settings = {"cache_type_k": kinds[0], "cache_type_v": kinds[1], "ctx_size": 512}
    settings |= {"flash_attn": "on", "retention": policy, "recall_every": 8}
    async with service_on(tiny_model, **settings, recall_bytes=1 << 26) as service:
        for scope in ("all", "layer", "head"):
            live = LiveBudget(policy, 64, scope)
            await ask(service, some_ids(200, 3), 24, live=live)
            (seq,) = [each for each in service.engine.pool if each.is_partial]
            assert len(bounded(seq).kept) <= 64
            await check_integrity(service)
            await settle(service)
            service.engine.pool.drop(seq)
        if policy == "icecache":
            assert service.engine.stats()["recall_tokens"] > 0
