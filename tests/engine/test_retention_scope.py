"""Live budgets that are kept by layer or by KV head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import ask, settle, some_ids
from services import OpenService
from thinned import Event, ThinnedModel, recorded

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Shape
from towerd.engine.base import LiveBudget

SHAPES = {
    "grouped": Shape(3, 64, 4, 2, 64, 512, head_dim=32, ftype="F32"),
    "of their own": Shape(2, 64, 2, 2, 64, 512, ftype="F32"),
    "shared": Shape(2, 64, 4, 1, 64, 512, head_dim=32, ftype="F32"),
}
BUDGET = 48


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    shape = SHAPES[request.param]
    path = tmp_path_factory.mktemp("scope") / "model.gguf"
    make_random_gguf(path, shape)
    return path, shape


def check(model: Path, shape: Shape, prompt: Any, answer: Any, events: list[Event]) -> float:
    """The largest error of the reply's probabilities, held against those of a model in float64 which sees
    the same positions."""
    ids = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    found = ThinnedModel(model, shape).logprobs(ids, events)[len(prompt) - 1 :]
    errors = [
        abs(logprob - expected[token])
        for probs, expected in zip(answer.probs, found, strict=True)
        for token, logprob in probs.top.items()
    ]
    return float(max(errors))


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("scope", ["layer", "head"])
async def test_each_group_sees_its_own_positions(
    service_on: OpenService,
    model: tuple[Path, Shape],
    scope: str,
    flash_attn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through several evictions and the end of the context, where every cell's keys are turned by a
    distance of their own."""
    path, shape = model
    prompt, live = some_ids(120, 1) % shape.n_vocab, LiveBudget("h2o", BUDGET, scope)
    settings = {
        "ctx_size": 160,
        "live_tokens": 320,
        "threads": 1,
        "retention": "h2o",
        "flash_attn": flash_attn,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
    }
    async with service_on(path, **settings) as service:
        with recorded(monkeypatch) as events:
            answer = await ask(service, prompt, 70, live=live)
        assert any(positions is None for _, positions in events)
        shapes = {each.shape[:2] for _, each in events if each is not None}
        assert (shape.n_layer, shape.n_head_kv if scope == "head" else 1) in shapes
        # llama.cpp's flash attention is off by as much with everything live
        assert check(path, shape, prompt, answer, events) < (1e-4 if flash_attn == "off" else 0.03)
        same = [(n, None if each is None else each[:1, :1]) for n, each in events]
        assert check(path, shape, prompt, answer, same) > 1, "the groups made no difference"
        await settle(service)
