"""Chats with a live budget: what stays in the context, what comes out, what the store has."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
import pytest
from oracle import ask, bounded_sequences, settle, some_ids
from services import EmbeddedService, OpenService

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.taps import Taps
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.engine.embedded.longchat.recall import REEVALUATED_TOKENS
from towerd.errors import ContextExceeded, InvalidRequest, NotSupported
from towerd.model.llama_model import LlamaModel
from towerd.models.bundled import bundled_model
from towerd.retention import View, can_recall, retention_config
from towerd.retention.streaming import StreamingConfig
from towerd.settings.config import RETENTIONS, UNBOUNDED, WATCHING, Config
from towerd.tokens import Ids

BOUNDED = tuple(name for name in RETENTIONS if name not in UNBOUNDED)
BY_MASS = tuple(name for name in WATCHING if not can_recall(name))


async def live_of(service: EmbeddedService) -> list[LiveSeq]:
    """The sequences with a budget."""
    found = service.engine.scheduler.call(lambda: bounded_sequences(service.engine))
    return await asyncio.wrap_future(found)


async def test_a_budget_as_long_as_the_chat_changes_nothing(service_on: OpenService) -> None:
    """Bit-identical probabilities with every policy, turn after turn, and nothing is evicted."""
    answers = []
    for policy in ("none", *BOUNDED):
        live = LiveBudget(policy, 300) if policy in BOUNDED else LiveBudget()
        settings = {"warm_bytes": 0, "retention": policy, "threads": 1}
        async with service_on(bundled_model(), **settings) as service:
            ids = some_ids(60)
            mine = []
            for turn in range(4):
                answer = await ask(service, ids, 12, live=live, scope=policy)
                mine.append((answer.ids, answer.probs, answer.finish.n_cached))
                ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(20, turn)])
            answers.append(mine)
            await settle(service)
            assert len(await live_of(service)) == (policy in BOUNDED)
            assert not any(seq.is_partial for seq in await live_of(service))
    assert all(mine == answers[0] for mine in answers)


@pytest.mark.parametrize("policy", BOUNDED)
async def test_a_chat_that_begins_as_a_thinned_one_did(
    service_on: OpenService, policy: str
) -> None:
    """It is answered as if the other had never been, and the store gets the rows of its prompt."""
    live, other = LiveBudget(policy, 64), some_ids(150)
    settings = {"retention": policy, "threads": 1, "flash_attn": "off"}
    ids = np.concatenate([other[:4], some_ids(150, 7)])
    answers = []
    for before in ([], [other]):
        async with service_on(bundled_model(), **settings) as service:
            for each in before:
                await ask(service, each, 8, live=live, scope="beside")
                await settle(service)
            scope = "beside" if before else "alone"
            answer = await ask(service, ids, 8, live=live, scope=scope)
            await settle(service)
            answers.append(answer)
            again = await ask(service, ids, 1, scope=scope)
            assert again.finish.reuse.prefill == 1
    alone, beside = ([token.logprob for token in answer.probs] for answer in answers)
    assert answers[0].ids == answers[1].ids
    assert beside == pytest.approx(alone, abs=1e-3)  # rows lie in other cells


class Reference:
    """StreamingLLM by hand in a context of its own: a prompt evaluated in full, cells removed at its end,
    and at the context's end moved together by llama.cpp's own shift of keys."""

    def __init__(self, budget: int, n_ctx: int) -> None:
        config = Config(model=bundled_model(), flash_attn="off", threads=1)
        self.model = LlamaModel(bundled_model(), config)
        self.context = LlamaContext(self.model, config, n_cells=n_ctx, n_seqs=1)
        self.budget, self.n_ctx = budget, n_ctx
        self.places: list[int] = []

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def logits(self, ids: Ids) -> npt.NDArray[np.float32]:
        """Evaluate `ids`, a prompt or a token of a reply, after what is there; the logits of the last."""
        at, index = 0, 0
        while at < len(ids):
            if len(self.places) >= self.n_ctx:
                self._evict()
            if self.places and self.places[-1] + 1 >= self.n_ctx:
                self._compact()
            place = self.places[-1] + 1 if self.places else 0
            n = min(len(ids) - at, self.n_ctx - len(self.places), self.n_ctx - place)
            index = self.context.batch.add(ids[at : at + n], place, 0, logits_last=True)
            self.context.decode()
            self.places += range(place, place + n)
            at += n
        logits = self.context.logits(index).copy()
        if len(self.places) >= self.budget:
            self._evict()
        return logits

    def _evict(self) -> None:
        n_gone = len(self.places) - (self.budget - self.budget // 8)
        sink = StreamingConfig().sink
        for place in self.places[sink : sink + n_gone]:
            self.context.seq_rm(0, place, place + 1)
        del self.places[sink : sink + n_gone]

    def _compact(self) -> None:
        for to, place in enumerate(self.places):
            memory = lib.llama_get_memory(self.context.ptr)
            lib.llama_memory_seq_add(memory, 0, place, place + 1, to - place)
        self.places = list(range(len(self.places)))


@pytest.mark.parametrize(("budget", "n_ctx", "bound"), [(64, 512, 0.0), (100, 256, 0.05)])
async def test_streaming_is_what_it_says(
    service_on: OpenService, budget: int, n_ctx: int, bound: float
) -> None:
    """Turn after turn the tokens that StreamingLLM by hand gives; exactly so until the chat is
    longer than the context. The budget holds, the store has every token."""
    reference = Reference(budget, n_ctx)
    live = LiveBudget("streaming", budget)
    settings = {"ctx_size": n_ctx, "live_tokens": n_ctx, "flash_attn": "off", "threads": 1}
    async with service_on(bundled_model(), **settings) as service:
        ids, n_seen = some_ids(90), 0
        for turn in range(8):
            answer = await ask(service, ids, 30, live=live, session="long")
            for i, token in enumerate(answer.ids):
                chat = np.concatenate([ids, np.array(answer.ids[:i], np.int32)])
                row = reference.logits(chat[n_seen:]).astype(np.float64)
                n_seen = len(chat)
                best = max(
                    row[t] for t in range(len(row)) if t not in service.engine.core.vocab.eog_ids
                )
                assert row[token] >= best - bound, (turn, i)
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(25, turn)])
            (seq,) = await live_of(service)
            assert seq.is_partial
            assert seq.n_cells <= budget
            assert answer.finish.reuse.kept is not None
            assert answer.finish.reuse.kept <= budget
            await settle(service)
        stats = service.engine.stats()
        assert (stats["retention_moves"] > 0) == (len(ids) > n_ctx + 100)
        stored = service.store.session_ids("long", "local")
        assert np.array_equal(stored, ids[: len(stored)])
        assert len(stored) == len(ids) - 25
    reference.close()


async def grow_chats(
    service: EmbeddedService, names: str, n_turns: int, live: LiveBudget
) -> list[list[int]]:
    """Chats that take turns; all tokens of each."""
    chats = {name: some_ids(70, ord(name)) for name in names}
    for turn in range(n_turns):
        for name in names:
            answer = await ask(service, chats[name], 12, live=live, session=name)
            more = some_ids(9, 100 * turn + ord(name))
            chats[name] = np.concatenate([chats[name], np.array(answer.ids, np.int32), more])
    await settle(service)
    return [chat.tolist() for chat in chats.values()]


@pytest.mark.parametrize("policy", BOUNDED)
async def test_switching_between_chats_changes_nothing(
    service_on: OpenService, policy: str
) -> None:
    """Where only one chat fits the context, each leaves it at every turn and comes back as it
    was: the same tokens as where all stay, and none evaluated twice (but for what a policy
    asks). The store keeps no rows: those that it has bring no attention."""
    live, alone = LiveBudget(policy, 48), {"hot_bytes": 0, "warm_bytes": 0}
    n_turns = 6  # sums differ in their last bits by where rows lie, and later two tokens are level
    async with service_on(bundled_model(), threads=1, retention=policy, **alone) as service:
        expected = await grow_chats(service, "a", n_turns, live)
    fewer = {"live_sequences": 1, "parallel": 1, "threads": 1, "retention": policy}
    async with service_on(bundled_model(), **fewer, **alone) as service:
        n_new = 0
        found = await grow_chats(service, "abc", n_turns, live)
        stats = service.engine.stats()
        n_new = sum(len(chat) for chat in found)
        n_again = 3 * n_turns * REEVALUATED_TOKENS if can_recall(policy) else 0
        assert stats["tokens_decoded"] <= n_new + n_again
        assert stats["parked_sequences"] == 2
        assert 0 < stats["parked_bytes"] <= service.engine.budgets.parked.bytes_max
    assert found[0] == expected[0]


async def test_exact_rows_stay_exact(service_on: OpenService) -> None:
    """Beside and after a chat with a partial live set, the same tokens without a budget are
    answered as if there were none; and the store got the rows of the whole prompt."""
    live = LiveBudget("streaming", 48)
    async with service_on(bundled_model(), threads=1) as service:
        first = await ask(service, some_ids(30), 10, live=live, session="x")
        ids = np.concatenate([some_ids(30), np.array(first.ids, np.int32)])
        long = np.concatenate([ids, some_ids(60, 5)])
        partial = await ask(service, long, 10, live=live, session="x")
        assert partial.finish.reuse.kept is not None
        await settle(service)
        whole = await ask(service, long, 10)
        assert whole.finish.reuse.kept is None
        assert whole.finish.reuse.live == 0
        assert whole.finish.reuse.hot == len(long) - 1
        alone = await ask(service, long, 10, scope="other")
    assert alone.finish.reuse.prefill == len(long)
    assert whole.ids == alone.ids


async def test_a_branch_of_a_partial_live_set(service_on: OpenService) -> None:
    """Another answer to the same prompt continues from what is live, and leaves the first alone."""
    live = LiveBudget("streaming", 64)
    async with service_on(bundled_model(), threads=1) as service:
        ids = some_ids(200)
        first = await ask(service, ids, 10, live=live)
        again = await ask(service, ids, 10, live=live)
        assert again.ids == first.ids
        assert again.finish.reuse.prefill == 1
        longer = np.concatenate([ids, np.array(first.ids, np.int32), some_ids(5)])
        after = await ask(service, longer, 10, live=live)
        assert after.finish.reuse.prefill <= 7
        await settle(service)


async def test_running_side_by_side_under_pressure(service_on: OpenService) -> None:
    """Budgets of several running chats together exceed the context: they give way to each other
    and all come to their end, with what they would have said alone."""
    live = LiveBudget("streaming", 120)
    settings = {"ctx_size": 256, "live_tokens": 256, "parallel": 4, "threads": 1}
    async with service_on(bundled_model(), **settings) as service:
        prompts = [some_ids(150, seed) for seed in range(4)]
        answers = await asyncio.gather(*(ask(service, ids, 120, live=live) for ids in prompts))
        assert all(len(answer.ids) == 120 for answer in answers)
        await settle(service)


async def test_hundreds_of_turns(service_on: OpenService) -> None:
    """Bounded memory, no crash, and the store has every token; TOWERD_TEST_TURNS runs more."""
    live = LiveBudget("streaming", 512)
    async with service_on(bundled_model(), threads=1, ctx_size=1024, live_tokens=1024) as service:
        ids = some_ids(10)
        for turn in range(int(os.environ.get("TOWERD_TEST_TURNS", "300"))):
            answer = await ask(service, ids, 4, live=live, session="endless")
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(6, turn)])
            assert service.engine.pool.cells_used <= 512
        await settle(service)
        stored = service.store.session_ids("endless", "local")
        assert np.array_equal(stored, ids[: len(stored)])
        assert len(stored) == len(ids) - 6
        ranking, nodes = service.tiers.ranking, service.store.nodes()
        ranking.check_integrity()
        with_rows = {node.id for node in nodes if node.hot is not None or node.file is not None}
        assert len(with_rows) * 4 < len(nodes)
        without = [node for node in nodes if node.id not in with_rows]
        expected = [node for node in without if ranking.explain(node)["hot"]]
        assert not expected, "the rows of a chat with a partial live set never come"


async def test_impossible_budgets(service_on: OpenService, tmp_path: Path) -> None:
    """One sentence that says what is possible, before anything runs."""
    async with service_on(bundled_model(), ctx_size=256, retention="h2o") as service:
        for live, words in (
            (LiveBudget("streaming", 15), "at least 16 and less than the context"),
            (LiveBudget("streaming", 256), "less than the context (256 tokens)"),
            (LiveBudget("lru", 64), "There is no retention 'lru'"),
        ):
            with pytest.raises(InvalidRequest, match=re.escape(words)):
                await ask(service, some_ids(20), 4, live=live)
        with pytest.raises(ContextExceeded):
            await ask(service, some_ids(300), 4)
        for policy in BOUNDED:  # every budget from the smallest on can be kept to
            for tokens in range(16, 256):
                service.engine.budgets.check(LiveBudget(policy, tokens))
    async with service_on(bundled_model(), ctx_size=256) as service:
        for policy in WATCHING:
            with pytest.raises(InvalidRequest, match=f"start it with --retention {policy}"):
                await ask(service, some_ids(20), 4, live=LiveBudget(policy, 64))
    mamba = tmp_path / "mamba.gguf"
    make_random_gguf(mamba, replace(PRESETS["tiny"], n_layer=2, arch="mamba"))
    async with service_on(mamba, ctx_size=256) as service:
        with pytest.raises(NotSupported, match="cannot lose one; take none or shift"):
            await ask(service, [1, 2, 3], 4, live=LiveBudget("streaming", 64))


@pytest.mark.parametrize("policy", BY_MASS)
@pytest.mark.parametrize("flash_attn", ["off", "on"])
async def test_masses_are_the_attention(
    service_on: OpenService, policy: str, flash_attn: str
) -> None:
    """What an eviction goes by is llama.cpp's own attention: a second context evaluates the same
    tokens with its weights tapped, and the policy keeps the same of them."""
    n, budget = 200, 64
    ids = some_ids(n, 3)
    taps = Taps()
    config = Config(model=bundled_model(), flash_attn="off", threads=1)
    model = LlamaModel(bundled_model(), config)
    context = LlamaContext(model, config, n_cells=256, n_seqs=1, taps=taps)
    taps.watch("kq_soft_max")
    context.batch.add(ids, 0, 0, logits_last=True)
    context.decode()
    weights = np.stack([taps.take("kq_soft_max", layer) for layer in taps.layers])
    n_voting = retention_config(policy, budget).window
    recent = weights.mean(axis=(0, 1))[-n_voting:].sum(axis=0)[:n]
    half_life = retention_config(policy, budget).half_life
    fading = 2 ** (-np.arange(n)[::-1] / half_life)
    every = (weights.mean(axis=(0, 1)) * fading[:, None]).sum(axis=0)[:n]
    context.close()
    model.close()
    settings = {
        "threads": 1,
        "retention": policy,
        "flash_attn": flash_attn,
        "batch_size": 70,
        "ubatch_size": 70,
    }
    async with service_on(bundled_model(), **settings) as service:
        await ask(service, ids, 2, live=LiveBudget(policy, budget))
        (seq,) = await live_of(service)
        live_set = bounded(seq)
        assert live_set.n_evictions == 1
        kept = live_set.kept[live_set.kept < n]
        goes_by = (live_set.recent, recent) if policy == "snapkv" else (live_set.mass, every)
        found, expected = goes_by[0][0, 0, : len(kept)], goes_by[1][kept]
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=2e-3)
        zeros = np.zeros(n, np.int64)
        mass, last = every.astype(np.float32), recent.astype(np.float32)
        view = View(np.arange(n), n, mass=mass, recent=last, messages=zeros)
        fresh = BoundedSet.whole(LiveBudget(policy, budget), n, 512)
        assert np.array_equal(fresh.policy.keep(view, fresh.n_target), kept)


@pytest.mark.parametrize("policy", WATCHING)
async def test_long_chats_by_attention(service_on: OpenService, policy: str) -> None:
    """Far beyond the context, several chats at once; budgets hold, accounts add up."""
    settings = {"ctx_size": 200, "live_tokens": 512, "threads": 1, "retention": policy}
    live = LiveBudget(policy, 60)
    async with service_on(bundled_model(), **settings) as service:
        chats = [some_ids(130, seed) for seed in range(2)]
        for turn in range(5):
            answers = await asyncio.gather(*(ask(service, ids, 40, live=live) for ids in chats))
            for i, answer in enumerate(answers):
                more = np.array(answer.ids, np.int32), some_ids(20, turn)
                chats[i] = np.concatenate([chats[i], *more])
            await settle(service)
            assert all(seq.n_cells <= 60 for seq in await live_of(service))
        assert service.engine.stats()["retention_moves"] > 0


async def test_chats_that_do_not_fit_in_ram_either(service_on: OpenService) -> None:
    """A chat that was pushed out of RAM by others is evaluated again, from its first token if the store has
    no rows."""
    live = LiveBudget("streaming", 48)
    fewer = {"live_sequences": 1, "parallel": 1, "threads": 1, "hot_bytes": 0, "warm_bytes": 0}
    async with service_on(bundled_model(), **fewer) as service:
        await grow_chats(service, "a", 2, live)
        (seq,) = await live_of(service)
        tower = service.engine.core.layout.token_bytes * seq.n_cells
        service.engine.budgets.parked.bytes_max = int(1.5 * tower)
        found = await grow_chats(service, "xyz", 4, live)
        assert service.engine.budgets.parked.nbytes <= 1.5 * tower
        assert service.engine.stats()["tokens_decoded"] > 2 * sum(map(len, found))
    async with service_on(bundled_model(), threads=1) as service:
        prompt, last = np.array(found[0][:-21], np.int32), found[0][-21:-9]
        assert (await ask(service, prompt, 12, live=live)).ids == last
