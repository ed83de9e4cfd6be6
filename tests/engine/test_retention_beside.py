"""Live budgets of models with windows or recurrent layers: the layers that attend to everything are
thinned, the others see what they always see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import ask, settle, some_ids
from services import OpenService
from thinned import Event, ThinnedModel
from thinned_beside import ThinnedGemma3, ThinnedLfm2
from window_model import N_LAYER, make_window_model

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Shape
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.retention import Positions

WINDOW, BUDGET = 24, 48
LFM2 = Shape(8, 128, 4, 2, 128, 512, head_dim=32, rope_freq_base=10000.0, ftype="F32", arch="lfm2")


class Model(NamedTuple):
    path: Path
    reference: Callable[[], ThinnedModel]
    policies: tuple[str, ...]
    bound: float


@pytest.fixture(scope="module", params=["window", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("beside") / f"{request.param}.gguf"
    if request.param == "window":
        make_window_model(path, WINDOW)
        # llama.cpp looks up its GELU in a table of f16
        return Model(path, lambda: ThinnedGemma3(path, N_LAYER, WINDOW), ("streaming", "h2o"), 0.02)
    make_random_gguf(path, LFM2)
    full = replace(LFM2, n_layer=2)
    return Model(path, lambda: ThinnedLfm2(path, LFM2, full), ("streaming",), 1e-4)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """What becomes of the live positions of a chat."""
    events: list[Event] = []
    mix, compacted, drop = BoundedSet.mix, BoundedSet.compacted, BoundedSet.drop

    def mixing(live: BoundedSet, chosen: Any, *more: Any) -> None:
        events.append((live.n, chosen))
        mix(live, chosen, *more)

    def dropping(live: BoundedSet, stay: Any) -> None:
        events.append((live.n, stay[None, None]))
        drop(live, stay)

    def moving(live: BoundedSet, places: Positions) -> None:
        events.append((live.n, None))
        compacted(live, places)

    with monkeypatch.context() as patch:
        patch.setattr(BoundedSet, "mix", mixing)
        patch.setattr(BoundedSet, "drop", dropping)
        patch.setattr(BoundedSet, "compacted", moving)
        yield events


def error(model: Model, prompt: Any, answer: Any, events: list[Event]) -> float:
    """The largest error of the reply's probabilities."""
    ids = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    found = model.reference().logprobs(ids, events)[len(prompt) - 1 :]
    return max(
        abs(logprob - expected[token])
        for probs, expected in zip(answer.probs, found, strict=True)
        for token, logprob in probs.top.items()
    )


EXACT = {
    "threads": 1,
    "flash_attn": "off",
    "cache_type_k": "f32",
    "cache_type_v": "f32",
}


@pytest.mark.parametrize("scope", ["all", "layer", "head"])
async def test_only_what_attends_to_everything_is_thinned(
    service_on: OpenService, model: Model, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through several evictions and beyond the end of the context, held against a model in float64 that
    sees the same positions."""
    policy, prompt = model.policies[-1], some_ids(120, 1)
    settings = {"ctx_size": 160, "live_tokens": 320, "retention": policy, **EXACT}
    async with service_on(model.path, **settings) as service:
        with recorded(monkeypatch) as events:
            answer = await ask(service, prompt, 70, live=LiveBudget(policy, BUDGET, scope))
        assert any(positions is None for _, positions in events)
        assert error(model, prompt, answer, events) < model.bound
        assert error(model, prompt, answer, []) > 0.3, "the budget made no difference"
        await settle(service)
