"""Live budgets of models with windows or recurrent layers: the layers that attend to everything are
thinned, the others see what they always see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import Answer, ask, settle, some_ids
from services import OpenService
from thinned import Event, ThinnedModel, recorded
from thinned_beside import ThinnedGemma3, ThinnedLfm2
from window_model import N_LAYER, make_window_model

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Shape
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.job import JobPhase
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.longchat.budgets import Budgets
from towerd.engine.embedded.longchat.recall import Recall
from towerd.errors import Unavailable
from towerd.tokens import Ids

WINDOW, BUDGET = 24, 48
SHAPE = Shape(
    4, 128, 4, 2, 128, 512, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=WINDOW
)
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
    return Model(path, lambda: ThinnedLfm2(path, LFM2, full), ("streaming", "h2o"), 1e-4)


def error(model: Model, prompt: Any, answer: Any, events: list[Event]) -> float:
    """The largest error of the reply's probabilities."""
    ids = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    found = model.reference().logprobs(ids, events)[len(prompt) - 1 :]
    errors = [
        abs(logprob - expected[token])
        for probs, expected in zip(answer.probs, found, strict=True)
        for token, logprob in probs.top.items()
    ]
    return float(max(errors))


SETTINGS: dict[str, Any] = {"ctx_size": 512, "threads": 1}
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


ARCHS = ("gemma3", "gpt-oss", "lfm2", "granitehybrid", "qwen35")


@pytest.fixture(scope="module", params=ARCHS)
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beside") / f"{request.param}.gguf"
    make_random_gguf(path, replace(SHAPE, arch=request.param))
    return path


def chat(answer: Answer, before: Ids, *more: Ids) -> Ids:
    return np.concatenate([before, np.array(answer.ids, np.int32), *more])


async def test_a_budget_as_long_as_the_chat_changes_nothing(
    service_on: OpenService, any_model: Path
) -> None:
    """Bit-identical probabilities, turn after turn, and nothing is evicted."""
    found = []
    for live in (LiveBudget(), LiveBudget("streaming", 300)):
        async with service_on(any_model, live.policy, **SETTINGS) as service:
            ids, mine = some_ids(60), []
            for turn in range(3):
                answer = await ask(service, ids, 12, live=live)
                mine.append((answer.ids, answer.probs))
                ids = chat(answer, ids, some_ids(20, turn))
            found.append(mine)
            await settle(service)
            assert service.engine.stats()["retention_evictions"] == 0
    assert found[0] == found[1]


async def test_switching_between_chats_changes_nothing(
    service_on: OpenService, any_model: Path
) -> None:
    """Where only one chat fits the context, each leaves it at every turn and comes back as it was: the same
    tokens as where all stay, and none evaluated twice."""
    live = LiveBudget("streaming", BUDGET)
    expected: list[Ids] = []
    for n_seqs, names in ((8, "a"), (1, "abc")):
        settings = SETTINGS | {"live_sequences": n_seqs, "parallel": 1}
        async with service_on(any_model, f"store{n_seqs}", **settings) as service:
            chats = {name: some_ids(70, ord(name)) for name in names}
            for turn, name in product(range(5), names):
                answer = await ask(service, chats[name], 12, live=live, session=name)
                chats[name] = chat(answer, chats[name], some_ids(9, 100 * turn + ord(name)))
            await settle(service)
            expected.append(chats["a"])
            stats = service.engine.stats()
            assert stats["tokens_decoded"] <= sum(map(len, chats.values()))
            assert stats["parked_sequences"] == len(names) - 1
    assert np.array_equal(expected[0], expected[1])


async def test_another_answer_to_a_prompt(service_on: OpenService, any_model: Path) -> None:
    """After a thinned prompt the same tokens come as before, live or from the store, and the first chat
    continues as if there were no second."""
    live = LiveBudget("streaming", 64)
    async with service_on(any_model, **SETTINGS) as service:
        ids = some_ids(200)
        first = await ask(service, ids, 10, live=live)
        again = await ask(service, ids, 10, live=live)
        assert again.ids == first.ids
        longer = chat(first, ids, some_ids(5))
        after = await ask(service, longer, 10, live=live)
        assert after.finish.reuse.prefill <= 7
        await settle(service)
        assert (await ask(service, ids, 10, live=live)).ids == first.ids


async def test_the_store_has_what_prefill_computes(
    service_on: OpenService, any_model: Path
) -> None:
    """A thinned prompt was read in full, so without a budget and after a restart it is answered as if there
    had been none."""
    live, ids = LiveBudget("streaming", BUDGET), some_ids(150)
    async with service_on(any_model, **SETTINGS) as service:
        thinned = await ask(service, ids, 10, live=live, session="x")
        assert thinned.finish.reuse.kept == BUDGET - BUDGET // 8
        await settle(service)
    async with service_on(any_model, **SETTINGS) as service:
        whole = await ask(service, ids, 10, session="x")
        assert whole.finish.reuse.prefill < len(ids) // 2
        again = await ask(service, ids, 10, live=live)
        assert again.ids == thinned.ids
        alone = await ask(service, ids, 10, scope="other")
    assert alone.finish.reuse.prefill == len(ids)
    assert whole.ids == alone.ids


async def test_side_by_side_under_pressure(service_on: OpenService, any_model: Path) -> None:
    """Budgets of several running chats together exceed the context: they give way to each other and all
    come to their end, far beyond the context where keys can be rotated."""
    live = LiveBudget("streaming", 120)
    settings = SETTINGS | {"ctx_size": 256, "live_tokens": 256, "parallel": 4}
    async with service_on(any_model, **settings) as service:
        prompts = [some_ids(150, seed) for seed in range(4)]
        answers = await asyncio.gather(*(ask(service, ids, 120, live=live) for ids in prompts))
        assert all(len(answer.ids) == 120 for answer in answers)
        await settle(service)


WATCHED = ("gemma3", "gpt-oss", "granitehybrid", "qwen35", "lfm2", "falcon-h1", "phi3")
"""The last three have no name for their rotated queries in llama.cpp."""


@pytest.mark.parametrize(
    ("arch", "policy"),
    [*product(WATCHED, ("snapkv", "icecache")), ("qwen35", "latem")],
)
async def test_long_chats_by_attention(
    service_on: OpenService, tmp_path: Path, arch: Any, policy: str
) -> None:
    """Far beyond the context, several chats at once, chosen by layer; budgets hold, accounts add up."""
    make_random_gguf(tmp_path / "model.gguf", replace(SHAPE, arch=arch))
    settings = {"ctx_size": 200, "live_tokens": 512, "threads": 1, "retention": policy}
    live = LiveBudget(policy, 60, "layer")
    async with service_on(tmp_path / "model.gguf", **settings) as service:
        chats = [some_ids(130, seed) for seed in range(2)]
        for turn in range(4):
            answers = await asyncio.gather(*(ask(service, ids, 40, live=live) for ids in chats))
            for i, answer in enumerate(answers):
                chats[i] = chat(answer, chats[i], some_ids(20, turn))
            await settle(service)
        assert service.engine.stats()["retention_moves"] > 0


@pytest.mark.parametrize("arch", ["lfm2", "qwen35"])
async def test_the_end_of_a_prompt_is_read_again(
    service_on: OpenService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: Any
) -> None:
    """After a recall that brings nothing back, from the state before it: what follows is what had followed
    without it."""
    make_random_gguf(tmp_path / "model.gguf", replace(SHAPE, arch=arch))
    settings = {"ctx_size": 300, "retention": "icecache", "recall_every": 0, **EXACT}
    choose, awaits = Recall.choose, Budgets.awaits_recall
    n_again: list[int] = []

    def only_if_full(self: Recall, seq: LiveSeq, live_set: BoundedSet, *rest: Any) -> int:
        if live_set.room == 0:
            return choose(self, seq, live_set, *rest)
        n_again.append(live_set.n_prompt - seq.n)
        return 0

    monkeypatch.setattr(Recall, "choose", only_if_full)
    live, found = LiveBudget("icecache", 60, "layer"), []
    for name in ("again", "once"):
        monkeypatch.setattr(
            Budgets, "awaits_recall", awaits if name == "again" else lambda *_: False
        )
        async with service_on(tmp_path / "model.gguf", name, **settings) as service:
            ids, mine = some_ids(130), []
            for turn in range(3):
                answer = await ask(service, ids, 10, live=live)
                mine += answer.probs
                ids = chat(answer, ids, some_ids((5, 20)[turn % 2], turn))
            await settle(service)
            found.append(mine)
    assert n_again == [5 + 1, 16]
    for again, once in zip(*found, strict=True):
        assert again.logprob == pytest.approx(once.logprob, abs=1e-3)


async def test_a_state_that_comes_last_is_the_one_to_go_back_to(
    service_on: OpenService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is thinned while its rows come from the store, before the state at its end has come."""
    make_random_gguf(tmp_path / "model.gguf", replace(SHAPE, arch="lfm2"))
    states: list[int] = []
    rewrite = LivePool.rewrite

    def noted(self: LivePool, seq: LiveSeq, rows: Any, evict: Any, beside: Any = None) -> None:
        states.extend([] if beside is None else [len(beside)])
        rewrite(self, seq, rows, evict, beside)

    monkeypatch.setattr(LivePool, "rewrite", noted)
    settings = {"ctx_size": 512, "threads": 1, "retention": "icecache", "recall_every": 0}
    ids, live = some_ids(300), LiveBudget("icecache", 60, "layer")
    warm = []
    for n, budget in ((285, None), (300, live)):
        async with service_on(tmp_path / "model.gguf", "store", **settings) as service:
            recall = service.engine.budgets.recall
            assert recall is not None
            n_bytes = 150 * recall.space.layout.token_bytes
            recall.space = replace(recall.space, bytes_max=n_bytes, disk_bytes_max=0)
            answer = await ask(service, ids[:n], 3, live=budget or LiveBudget())
            warm.append(answer.finish.reuse.warm)
            await settle(service)
    assert warm == [0, 284]
    assert states
    assert min(states) > 1000


async def test_a_cut_behind_the_end_of_the_context(service_on: OpenService, tmp_path: Path) -> None:
    """A window's rows are gone where the chat was moved, so one that is cut there is read anew."""
    path, prompt, live = tmp_path / "model.gguf", some_ids(120, 1), LiveBudget("streaming", BUDGET)
    make_window_model(path, WINDOW)
    rows = {"retention": "streaming", "warm_bytes": 0, "hot_bytes": 0, **EXACT}
    settings = {"ctx_size": 160, "live_tokens": 320, **rows}
    async with service_on(path, **settings) as service:
        first = await ask(service, prompt, 42, live=live)
        assert service.engine.stats()["retention_moves"] > 0
        cut = np.concatenate([prompt, np.array(first.ids, np.int32)])[:153]
        ids = np.concatenate([cut, some_ids(4, 7)])
        answer = await ask(service, ids, 3, live=live)
    async with service_on(path, **settings) as service:
        expected = await ask(service, ids, 3, live=live)
    assert answer.ids == expected.ids
    for mine, theirs in zip(answer.probs, expected.probs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


async def test_no_cells_to_go_back(
    service_on: OpenService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells are short when the end of a prompt is to be read again: another request gives way, and both come to
    their end."""
    make_random_gguf(tmp_path / "model.gguf", replace(SHAPE, arch="lfm2"))
    rewrite, n_refused = LivePool.rewrite, 0

    def refused(self: LivePool, seq: LiveSeq, rows: Any, evict: Any, beside: Any = None) -> None:
        nonlocal n_refused
        if beside is not None and self.n_busy() > 1 and not n_refused:
            n_refused += 1
            raise Unavailable("There are no cells.")
        rewrite(self, seq, rows, evict, beside)

    live = LiveBudget("icecache", 60, "layer")
    settings = {"ctx_size": 300, "live_tokens": 600, "threads": 1, "retention": "icecache"}
    async with service_on(tmp_path / "model.gguf", parallel=2, **settings) as service:
        ids = some_ids(130)
        ids = chat(await ask(service, ids, 10, live=live), ids, some_ids(40, 1))
        monkeypatch.setattr(LivePool, "rewrite", refused)
        other = asyncio.create_task(ask(service, some_ids(60, 9), 200, scope="other"))
        active = service.engine.scheduler.active
        while not any(job.phase is JobPhase.DECODE for job in active):
            assert not other.done()
            await asyncio.sleep(0)
        active[0].t_submit += 3600.0  # the one that gives way
        answers = await asyncio.gather(other, ask(service, ids, 10, live=live))
        assert n_refused == 1
        assert [len(answer.ids) for answer in answers] == [200, 10]
        await settle(service)
