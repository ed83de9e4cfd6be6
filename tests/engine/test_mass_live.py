"""Attention that all queries of a chat pay, the more the later, by layer and KV head, against a model in
float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import ask, bounded_sequences, settle, some_ids
from services import OpenService
from thinned import Event, ThinnedModel

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Shape
from towerd.engine.base import GenerateRequest, LiveBudget, Progress
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.retention import retention_config

SHAPE = Shape(3, 64, 4, 2, 64, 512, head_dim=32, ftype="F32")
BUDGET = 48
SETTINGS = {
    "ctx_size": 160,
    "live_tokens": 320,
    "threads": 1,
    "retention": "h2o",
    "flash_attn": "off",
    "cache_type_k": "f32",
    "cache_type_v": "f32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mass") / "model.gguf"
    make_random_gguf(path, SHAPE)
    return path


class Watched:
    """What each eviction went by, and what became of the live set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.found: list[tuple[Any, Any] | None] = []
        """(positions, masses) at each event; None where rows move together."""
        mix, drop, moved = BoundedSet.mix, BoundedSet.drop, BoundedSet.compacted

        def mixing(live: BoundedSet, chosen: Any, *more: Any) -> None:
            self._note(live, chosen)
            mix(live, chosen, *more)

        def dropping(live: BoundedSet, stay: Any) -> None:
            self._note(live, stay[None, None])
            drop(live, stay)

        def moving(live: BoundedSet, places: Any) -> None:
            self.events.append((live.n, None))
            self.found.append(None)
            moved(live, places)

        patch.setattr(BoundedSet, "mix", mixing)
        patch.setattr(BoundedSet, "drop", dropping)
        patch.setattr(BoundedSet, "compacted", moving)

    def _note(self, live: BoundedSet, chosen: Any) -> None:
        self.events.append((live.n, chosen))
        self.found.append((live.positions(), live.mass))


@pytest.mark.parametrize("batch", [160, 48])
@pytest.mark.parametrize("scope", ["layer", "head"])
async def test_every_query_counts(
    service_on: OpenService, model: Path, scope: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a prompt, in one batch or in several, those of a reply through evictions, and those from
    before the rows moved together."""
    watched = Watched(monkeypatch)
    prompt = some_ids(150, 1) % SHAPE.n_vocab
    live = LiveBudget("h2o", BUDGET, scope)
    settings = {**SETTINGS, "batch_size": batch, "ubatch_size": batch}
    async with service_on(model, **settings) as service:
        answer = await ask(service, prompt, 70, live=live)
        assert service.engine.stats()["retention_observe_s"] > 0
        await settle(service)
    ids = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    oracle = ThinnedModel(model, SHAPE, retention_config("h2o", BUDGET).half_life)
    oracle.logprobs(ids, watched.events)
    assert len([each for each in watched.found if each]) > 5
    assert None in watched.found
    for found, expected in zip(watched.found, oracle.masses, strict=True):
        if found is None:
            continue
        positions, mass = found
        if scope == "layer":
            assert mass.shape[1] == 1
            expected = expected.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(
            mass, np.take_along_axis(expected, positions, axis=2), rtol=1e-3, atol=1e-4
        )


async def test_what_the_store_has_brings_no_attention(
    service_on: OpenService, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt that is resumed from the store, the queries that are evaluated count, and no others."""
    watched = Watched(monkeypatch)
    prompt = some_ids(100, 2) % SHAPE.n_vocab
    async with service_on(model, **SETTINGS) as service:
        n_evaluated = 70
        await ask(service, prompt[: 100 - n_evaluated], 1)
        await settle(service)
        answer = await ask(service, prompt, 2, live=LiveBudget("h2o", BUDGET))
        assert answer.finish.reuse.prefill == n_evaluated
        (seq,) = bounded_sequences(service.engine)
        assert bounded(seq).n_evictions == 1
        await settle(service)
    (found,) = watched.found
    assert found is not None
    half_life = retention_config("h2o", BUDGET).half_life
    paid = sum(2 ** (-age / half_life) for age in range(n_evaluated))
    np.testing.assert_allclose(found[1].sum(axis=2), paid, rtol=1e-4)


async def test_a_parked_chat_holds_its_rows_once(service_on: OpenService, model: Path) -> None:
    """Its request was cancelled while it read a prompt longer than the context: the copy of the keys that
    the reading needed is gone."""
    one = {"live_sequences": 1, "parallel": 1, "batch_size": 32, "ubatch_size": 32}
    live = LiveBudget("h2o", BUDGET)
    async with service_on(model, **SETTINGS | one) as service:
        request = GenerateRequest(
            ids=some_ids(600, 3) % SHAPE.n_vocab,
            fields={"temperature": 0},
            n_predict=10,
            live=live,
            return_progress=True,
        )
        generation = service.engine.generate(request)
        async for event in generation:
            if isinstance(event, Progress) and event.processed > 330:
                break
        await generation.cancel()
        generation.release()
        await ask(service, some_ids(20, 4) % SHAPE.n_vocab, 2, scope="b")  # pushes it out
        (parked,) = list(service.engine.budgets.parked)
        row = service.engine.core.layout.token_bytes
        assert parked.n > 330
        n_held = parked.nbytes - sum(each.queries.nbytes for each in parked.live_set.observed)
        assert n_held < 1.2 * row * len(parked.live_set.kept)
        await settle(service)
