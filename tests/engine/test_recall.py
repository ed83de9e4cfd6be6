"""Chats that bring back what left the context: IceCache in the daemon."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from oracle import ask, bounded_sequences, check_integrity, inside, settle, some_ids
from services import EmbeddedService, OpenService

from lab.reference.array_keys import ArrayKeys
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.taps import Taps
from towerd.engine.embedded.live.live_set import EVERYTHING, BoundedSet
from towerd.engine.embedded.live.offloaded_rows import keys_of
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.longchat.budgets import bounded
from towerd.engine.embedded.longchat.recall import QUERY_TOKENS_MAX, Recall, served
from towerd.errors import TowerdError
from towerd.model.llama_model import LlamaModel
from towerd.models.bundled import bundled_model
from towerd.retention import Recalling, View, open_retention
from towerd.settings.config import Config
from towerd.slots.blob import parse_rows

SETTINGS = {"threads": 1, "retention": "icecache"}


def recall_of(service: EmbeddedService) -> Recall:
    recall = service.engine.budgets.recall
    assert recall is not None
    return recall


@pytest.mark.parametrize(("recall_bytes", "is_said"), [(1 << 16, True), (1 << 24, False)])
async def test_a_start_that_can_recall_nothing_says_so(
    service_on: OpenService, caplog: pytest.LogCaptureFixture, recall_bytes: int, is_said: bool
) -> None:
    """With what would help, which does."""
    settings = {**SETTINGS, "live_budget": 128, "recall_disk_bytes": 0}
    async with service_on(bundled_model(), **settings, recall_bytes=recall_bytes):
        assert ("brings nothing back" in caplog.text) == is_said
    if is_said:
        found = re.search(r"alone. (\d+)M", caplog.text)
        assert found is not None
        caplog.clear()
        more = int(found[1]) << 20
        async with service_on(bundled_model(), **settings, recall_bytes=more) as service:
            assert "brings nothing back" not in caplog.text
            live = LiveBudget("icecache", 128)
            await ask(service, some_ids(250), 4, live=live)
            _, live_set = await the_chat(service)
            assert len(live_set.offloaded) > 128


async def the_chat(service: EmbeddedService) -> tuple[LiveSeq, BoundedSet]:
    """The only sequence with a budget."""
    (seq,) = await inside(service, lambda: bounded_sequences(service.engine))
    return seq, bounded(seq)


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("cache_type", ["f16", "f32"])
async def test_after_recall_of_everything_it_is_the_full_cache(
    service_on: OpenService, flash_attn: str, cache_type: str
) -> None:
    """Positions dropped at random and brought back, the chat continues as if none had been; so does
    another chat that shares cells with it, whose rows stay the same to the bit."""
    live = LiveBudget("icecache", 300)
    types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    ids = some_ids(150)
    async with service_on(bundled_model(), **SETTINGS, flash_attn=flash_attn, **types) as service:
        engine = service.engine
        other = await ask(service, ids[:100], 20, scope="local")
        first = await ask(service, ids, 1, live=live)
        seq, live_set = await the_chat(service)
        neighbour = next(s for s in engine.pool if s.live_set is EVERYTHING)

        def drop_and_recall() -> tuple[bytes, bytes]:
            rng = np.random.default_rng(5)
            memory = engine.core.memory
            before = memory.rows(neighbour.id, 0, neighbour.n)
            recall = recall_of(service)
            recall.offload(seq, live_set)
            for _ in range(3):
                stay = np.flatnonzero(rng.random(seq.n) < 0.4)
                stay = np.union1d(stay, [0, seq.n - 1])
                stay = np.intersect1d(stay, live_set.kept)
                engine.pool.evict(seq, live_set, stay)
                gone = np.setdiff1d(np.arange(seq.n), live_set.kept)
                half = np.union1d(gone[rng.random(len(gone)) < 0.5], live_set.kept)
                recall.put(seq, live_set, half[None, None], bool)
                engine.pool.check_integrity()
            recall.put(seq, live_set, np.arange(seq.n)[None, None], bool)
            after = memory.rows(neighbour.id, 0, neighbour.n)
            assert before is not None
            assert after is not None
            return (
                b"".join(p.tobytes() for p in before.planes()),
                b"".join(p.tobytes() for p in after.planes()),
            )

        before, after = await inside(service, drop_and_recall)
        assert before == after
        assert seq.n_cells == seq.n
        await check_integrity(service)
        longer = np.concatenate([ids, np.array(first.ids, np.int32), some_ids(40, 1)])
        answer = await ask(service, longer, 10, live=live)
        assert answer.finish.reuse.live >= 150
        assert answer.finish.reuse.kept == len(longer)
        expected = await ask(service, longer, 10, scope="fresh")
        assert expected.finish.reuse.prefill == len(longer)
        again = await ask(service, ids[:100], 20, scope="local")
        assert again.ids == other.ids
        assert answer.ids == expected.ids
        for mine, theirs in zip(answer.probs, expected.probs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=0.02)
        await settle(service)


async def test_what_stays_is_what_the_policy_says(service_on: OpenService) -> None:
    """The first choice equals the pure policy's, given the keys and queries that a context of its
    own has of the same tokens."""
    n, budget = 96, 96
    ids = some_ids(n, 3)
    taps = Taps()
    config = Config(model=bundled_model(), flash_attn="off", threads=1)
    model = LlamaModel(bundled_model(), config)
    context = LlamaContext(model, config, n_cells=256, n_seqs=1, taps=taps)
    taps.watch("Qcur")
    context.batch.add(ids, 0, 0, logits_last=True)
    context.decode()
    queries = np.stack([taps.take("Qcur", layer).transpose(1, 0, 2) for layer in taps.layers])
    keys = keys_of(parse_rows(context.get_state(0)), queries.shape[3])
    context.close()
    model.close()
    limits = Config(threads=1, recall_layer_step=1)
    policy = open_retention(served(LiveBudget("icecache", budget), limits))
    view = View(np.arange(n), n, keys=ArrayKeys(keys), queries=queries[:, :, -QUERY_TOKENS_MAX:])
    expected = policy.keep(view, BoundedSet.whole(LiveBudget("icecache", budget), 0, 512).n_target)
    settings = {**SETTINGS, "recall_layer_step": 1, "flash_attn": "off"}
    async with service_on(bundled_model(), **settings) as service:
        await ask(service, ids, 2, live=LiveBudget("icecache", budget))
        _, live_set = await the_chat(service)
        assert live_set.n_evictions == 1
        kept = live_set.kept[live_set.kept < n]
        assert np.array_equal(kept, expected)
        assert np.array_equal(live_set.offloaded.positions, np.arange(n))


async def test_long_chats_recall(service_on: OpenService) -> None:
    """Turn after turn: the budget holds, old positions come back, every account adds up, the store
    has every token, and what may come back stays within its bytes."""
    live = LiveBudget("icecache", 64)
    settings = {**SETTINGS, "recall_every": 8, "ctx_size": 1024}
    async with service_on(bundled_model(), **settings) as service:
        recall = recall_of(service)
        ids = some_ids(90)
        n_max = 0
        for turn in range(8):
            answer = await ask(service, ids, 30, live=live, session="long")
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(25, turn)])
            seq, live_set = await the_chat(service)
            await settle(service)
            assert seq.n_cells <= 64
            assert answer.finish.reuse.kept is not None
            assert answer.finish.reuse.kept <= 64
            assert isinstance(live_set.policy, Recalling)
            n_max = recall.space.n_max(live_set)
            if turn == 3:  # from here on it is less than the chat
                aside = live_set.n_bytes_offloaded
                recall.space = replace(recall.space, bytes_max=aside // 2, disk_bytes_max=0)
            elif turn > 3:
                assert len(live_set.offloaded) <= n_max + live_set.n_release
        assert n_max < 300
        assert recall.n_tokens_recalled > 50
        assert 0 < recall.n_reads <= recall.n_tokens_recalled
        stats = service.engine.stats()
        assert 0 < stats["recall_index_s"] < stats["recall_choose_s"]
        stored = service.store.session_ids("long", "local")
        assert np.array_equal(stored, ids[: len(stored)])
        assert len(stored) == len(ids) - 25


async def test_the_prompt_is_asked_what_it_looks_for(service_on: OpenService) -> None:
    """Before a reply begins the last tokens of its prompt are evaluated again, after the recall;
    without a recall nothing is evaluated twice."""
    settings = {**SETTINGS, "recall_every": 0, "ctx_size": 1024}
    async with service_on(bundled_model(), **settings) as service:
        ids = some_ids(200)
        whole = await ask(service, ids, 4, live=LiveBudget("icecache", 512))
        assert service.engine.stats()["tokens_decoded"] == 203
        assert service.engine.stats()["recall_choices"] == 0
        ids = np.concatenate([ids, np.array(whole.ids, np.int32), some_ids(20, 1)])
        n = service.engine.stats()["tokens_decoded"]
        live = LiveBudget("icecache", 100)
        first = await ask(service, ids, 4, live=live, scope="b")
        assert service.engine.stats()["tokens_decoded"] - n == len(ids) + 3  # all of it was there
        ids = np.concatenate([ids, np.array(first.ids, np.int32), some_ids(20, 2)])
        n = service.engine.stats()["tokens_decoded"]
        await ask(service, ids, 4, live=live, scope="b")
        seq, live_set = await the_chat_of(service, "b")
        again = service.engine.stats()["tokens_decoded"] - n - 21 - 3
        assert 1 <= again <= 16
        assert live_set.n_chosen >= len(ids) - again
        assert seq.n == len(ids) + 3


async def the_chat_of(service: EmbeddedService, scope: str) -> tuple[LiveSeq, BoundedSet]:
    (seq,) = await inside(service, lambda: [s for s in service.engine.pool if s.scope == scope])
    return seq, bounded(seq)


async def test_stored_rows_need_not_be_evaluated(service_on: OpenService) -> None:
    """A chat that was evaluated in full continues under a budget after a restart: its rows come
    from the store, more than the budget holds, and all of them may come back."""
    ids = some_ids(400)
    live = LiveBudget("icecache", 64)
    async with service_on(bundled_model(), **SETTINGS) as service:
        first = await ask(service, ids, 4, session="doc")
        await settle(service)
    longer = np.concatenate([ids, np.array(first.ids, np.int32), some_ids(20, 1)])
    async with service_on(bundled_model(), **SETTINGS) as service:
        answer = await ask(service, longer, 8, live=live, session="doc")
        reuse = answer.finish.reuse
        assert reuse.hot + reuse.warm >= 400
        assert reuse.prefill <= 24
        assert reuse.kept is not None
        assert reuse.kept <= 64
        seq, live_set = await the_chat(service)
        assert len(live_set.offloaded) >= 400
        await settle(service)
        budget = LiveBudget("icecache", 500)  # all of it fits: what was stored is exact
        full = await ask(service, longer, 8, live=budget, session="doc")
        plain = await ask(service, longer, 8, scope="fresh")
        assert full.ids == plain.ids


async def test_a_branch_has_its_own_offloaded_rows(service_on: OpenService) -> None:
    """Two answers to one prompt: what one brings back or takes away is not the other's."""
    live = LiveBudget("icecache", 96)
    async with service_on(bundled_model(), **SETTINGS) as service:
        ids = some_ids(250)
        first = await ask(service, ids, 10, live=live)
        again = await ask(service, ids, 10, live=live)
        assert again.finish.reuse.prefill == 1
        longer = np.concatenate([ids, np.array(first.ids, np.int32), some_ids(30)])
        await ask(service, longer, 10, live=live)
        edited = np.concatenate([ids, some_ids(40, 9)])
        after = await ask(service, edited, 10, live=live)
        assert after.finish.reuse.prefill <= 42
        await settle(service)


async def test_beyond_the_context(service_on: OpenService) -> None:
    """A chat longer than the context moves down: nothing is forgotten, and anything can still come back,
    what is older than a context at places nearer than it was."""
    live = LiveBudget("icecache", 60)
    settings = {**SETTINGS, "ctx_size": 200, "live_tokens": 512, "recall_every": 10}
    async with service_on(bundled_model(), **settings) as service:
        ids = some_ids(130)
        recalled, moves = [0], [0]
        for turn in range(6):
            answer = await ask(service, ids, 40, live=live)
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(20, turn)])
            await settle(service)
            seq, live_set = await the_chat(service)
            assert seq.n_cells <= 60
            assert seq.place_next <= 200
            stats = service.engine.stats()
            recalled.append(stats["recall_tokens"])
            moves.append(stats["retention_moves"])
            offloaded = live_set.offloaded
            assert np.array_equal(offloaded.positions, np.arange(len(offloaded)))
            places = offloaded.places(offloaded.positions)
            assert np.array_equal(places[:100], np.arange(len(places))[:100])
            assert places.max() < 200
            n_last = min(len(places), int(places[-1]) + 1)
            assert (np.diff(places[len(places) - n_last :]) == 1).all()
            dropped = np.flatnonzero(np.diff(places) < 0) + 1
            assert (places[dropped] == 0).all()
        assert moves[-1] >= 3
        assert recalled[-1] > recalled[-2] > recalled[-3]


@pytest.mark.parametrize("policy", ["streaming", "icecache"])
async def test_what_is_left_of_a_long_chat_is_written_together(
    service_on: OpenService, policy: str
) -> None:
    """A full chat continues under a small budget: the same as if its rows stayed where they
    were."""
    ids = some_ids(400)
    answers = []
    for is_packed in (True, False):
        settings = {**SETTINGS, "warm_bytes": 0, "hot_bytes": 0}
        async with service_on(bundled_model(), **settings) as service:
            first = await ask(service, ids, 4)
            if not is_packed:  # cells that another sequence has, too, stay where they are
                await ask(service, np.concatenate([ids, some_ids(9, 2)]), 1)
            longer = np.concatenate([ids, np.array(first.ids, np.int32), some_ids(20, 1)])
            answers.append(await ask(service, longer, 8, live=LiveBudget(policy, 64)))
            assert answers[-1].finish.reuse.live == 403
            assert service.engine.stats()["retention_packed"] == is_packed
            await check_integrity(service)
    packed, scattered = answers
    assert packed.ids == scattered.ids
    for mine, theirs in zip(packed.probs, scattered.probs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=0.05)


async def test_rows_that_are_not_written_together(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp refuses the rows of a chat after it has let go of them: that request ends alone, no other
    continues from what is left, and the next one evaluates the chat again."""
    ids, live = some_ids(400), LiveBudget("streaming", 64)
    async with service_on(bundled_model(), threads=1, hot_bytes=0, warm_bytes=0) as service:
        expected = await ask(service, ids, 8, live=live, scope="before")
        found: list[BoundedSet] = []

        def refuse(seq: int, *_: object, **more: object) -> None:
            (chat,) = [s for s in bounded_sequences(service.engine) if s.id == seq]
            found.append(bounded(chat))
            raise TowerdError("these rows are refused")

        with monkeypatch.context() as patch:
            patch.setattr(service.engine.core.memory, "append", refuse)
            with pytest.raises(TowerdError, match="these rows are refused"):
                await ask(service, ids, 8, live=live)
        (live_set,) = found
        assert live_set.failure is not None
        assert not live_set.can_continue_from(live_set.n)
        await check_integrity(service)
        again = await ask(service, ids, 8, live=live)
        assert again.finish.reuse.live == 0
        assert again.ids == expected.ids
        await settle(service)
