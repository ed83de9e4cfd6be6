"""Rows of long chats that the store has: they are read where they are mapped, and take no RAM."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import ask, check_integrity, inside, live_sets, settle, some_ids
from random_rows import HEAD_SIZE, N_KV, N_LAYER, random_rows
from services import EmbeddedService, OpenService

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.offloaded_rows import (
    OffloadedKeys,
    OffloadedRows,
    Pages,
    RowChunk,
    keys_of,
)
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.longchat.offload_space import OffloadSpace
from towerd.engine.embedded.longchat.recall import Recall, served
from towerd.kernels.formats import BY_NAME
from towerd.models.bundled import bundled_model
from towerd.retention import Rows
from towerd.settings.config import Config
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows
from towerd.store.files.writes import DailyWrites
from towerd.system.machine import ram_bytes

LIVE = LiveBudget("icecache", 64, "layer")
SETTINGS = {"threads": 1, "retention": "icecache", "ctx_size": 1024, "recall_every": 8}


def transposed(rows: KVRows) -> KVRows:
    """The same rows with V channel by channel, as without flash attention."""
    v = []
    for plane, tokens in zip(rows.layout.v, rows.v, strict=True):
        elements = tokens.reshape(len(rows), -1, plane.format.block_bytes)
        v.append(np.ascontiguousarray(elements.transpose(1, 0, 2)).reshape(elements.shape[1], -1))
    return KVRows(rows.layout, rows.positions, rows.k, tuple(v), rows.ext, True)


@given(st.integers(0, 1 << 30), st.sampled_from(["f16", "f32"]), st.booleans())
def test_stored_rows_are_those_that_were_copied(
    tmp_path_factory: pytest.TempPathFactory, seed: int, name: str, is_transposed: bool
) -> None:
    """Any part of the rows, from RAM and from disk, in any order; what is at another place stays."""
    rng = np.random.default_rng(seed)
    whole = random_rows(rng, name, 0, 30)
    cut = int(rng.integers(1, 30))
    first = RowChunk.of(whole.slice(0, cut), np.arange(cut), rng.permutation(cut))
    others = RowChunk.of(whole.slice(cut, 30), np.arange(cut, 30) + 3, np.arange(30 - cut))
    folder = tmp_path_factory.mktemp("pages")
    paged = Pages.of(first, folder, None, range(N_LAYER)) if rng.random() < 0.5 else first
    before = OffloadedRows().add(paged).add(others)
    p0 = int(rng.integers(0, 25))
    piece = whole.slice(p0, int(rng.integers(p0 + 1, 31)))
    after = before.stored([transposed(piece) if is_transposed else piece], before.positions[:0])
    after.check_integrity()
    in_piece = [p for p in range(cut) if p0 <= p < piece.p1]
    assert np.setdiff1d(before.positions, after.copied).tolist() == in_piece
    more = np.arange(p0, piece.p1)[::2]
    alone = OffloadedRows().stored([piece], more)
    assert alone.n_bytes == 0
    for mine, theirs in zip(alone.rows(more).planes(), whole.planes(), strict=True):
        assert np.array_equal(mine, theirs[more])
    stay = np.flatnonzero(rng.random(33) < 0.7)
    after = after.only(stay)
    stay = np.intersect1d(stay, before.positions)
    assert after.positions.tolist() == stay.tolist()
    if not len(stay):
        return
    expected = before.rows(stay)
    assert after.places(stay).tolist() == before.places(stay).tolist()
    for mine, theirs in zip(after.rows(stay).planes(), expected.planes(), strict=True):
        assert np.array_equal(mine, theirs)
    keys, plain = OffloadedKeys(after, HEAD_SIZE), keys_of(expected, HEAD_SIZE)
    for layer, head in np.ndindex(N_LAYER, N_KV):
        found = keys.read(layer, head, np.arange(len(stay)))
        assert np.array_equal(found, plain[layer, head])


async def the_chat(service: EmbeddedService) -> BoundedSet:
    (live_set,) = await inside(service, lambda: live_sets(service.engine))
    return live_set


@pytest.mark.parametrize("policy", ["icecache", "latem"])
async def test_an_edit_within_a_stored_prompt(service_on: OpenService, policy: str) -> None:
    """What can be recalled from behind the edit are its own rows, not those of what it replaced."""
    ids = np.concatenate([some_ids(600, 1)[:300], some_ids(300, 2)])
    settings = SETTINGS | {"live_tokens": 4096, "flash_attn": "off"}
    async with service_on(bundled_model(), **settings) as service:
        await ask(service, some_ids(600, 1), 1)
        await settle(service)
        await ask(service, ids, 40, live=LiveBudget(policy, 64, "layer"))
        await settle(service)
        offloaded = (await the_chat(service)).offloaded
        at = offloaded.positions[offloaded.positions < len(ids)]
        assert (at >= 300).sum() > 200
        await ask(service, ids, 1, scope="alone")

        def rows() -> tuple[KVRows, KVRows | None]:
            (alone,) = [seq for seq in service.engine.pool if seq.scope == "alone"]
            return offloaded.rows(at), service.engine.core.memory.rows(alone.id, 0, len(ids))

        found, expected = await inside(service, rows)
        assert expected is not None
        for mine, theirs in zip(found.planes(), expected.planes(), strict=True):
            pair = [plane.view(np.float16).astype(np.float32) for plane in (mine, theirs[at])]
            assert np.allclose(pair[0], pair[1], atol=0.01 * np.abs(pair[1]).max())


@pytest.mark.parametrize("flash_attn", ["on", "off"])
async def test_a_document_in_the_store_takes_no_ram(
    service_on: OpenService, tmp_path: Path, flash_attn: str
) -> None:
    """A document that was read is resumed and answered from: its rows are the store's, and the same as
    those of a chat that copies them, also when the store has dropped its files."""
    ids = some_ids(700, 3)
    settings = {**SETTINGS, "flash_attn": flash_attn, "recall_disk_bytes": 0}
    keys: list[Rows] = []
    for is_stored in (False, True):
        async with service_on(bundled_model(), **settings) as service:
            if is_stored:
                await ask(service, ids, 1)
                await settle(service)
            question = np.concatenate([ids, some_ids(40, 9)])
            answer = await ask(service, question, 40, live=LIVE)
            await settle(service)
            offloaded = (await the_chat(service)).offloaded
            keys.append(OffloadedKeys(offloaded, 8).read(2, 0, np.arange(700)))
            if not is_stored:
                continue
            assert len(offloaded) > 700
            assert len(offloaded.copied) < 150
            assert (
                offloaded.n_bytes == len(offloaded.copied) * offloaded.chunks[0].layout.token_bytes
            )
            for node in list(service.store.nodes()):
                if node.file is not None:
                    service.store.rows.drop_file(node.file)
            longer = np.concatenate([question, np.array(answer.ids, np.int32), some_ids(20, 4)])
            assert len((await ask(service, longer, 20, live=LIVE)).ids) == 20
            await check_integrity(service)
            del offloaded
            await check_dropped(service)
    np.testing.assert_allclose(keys[0], keys[1], atol=0.02)


async def test_a_prompt_from_the_store_is_thinned_as_it_was(service_on: OpenService) -> None:
    """By the queries of as many tokens, so that the answer is the same after a restart."""
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    ids, answers = some_ids(500, 3), []
    for _ in range(2):
        async with service_on(bundled_model(), **SETTINGS | exact) as service:
            answers.append(await ask(service, ids, 12, live=LIVE))
            await settle(service)
    read, resumed = answers
    assert resumed.finish.reuse.prefill < 20
    assert resumed.ids == read.ids
    for mine, theirs in zip(resumed.probs, read.probs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize("disk_bytes", [0, 1 << 30])
async def test_a_document_in_the_store_is_not_copied(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, disk_bytes: int
) -> None:
    """It is resumed and answered from within less RAM than its rows take: all of it may come back, and nothing
    of it is written to disk again."""
    peaks: list[int] = []
    offload = Recall.offload

    def measured(self: Recall, seq: LiveSeq, live_set: BoundedSet) -> None:
        offload(self, seq, live_set)
        peaks.append(live_set.n_bytes_offloaded // self.space.layout.token_bytes)

    monkeypatch.setattr(Recall, "offload", measured)
    ids = some_ids(900, 3)
    async with service_on(bundled_model(), **SETTINGS) as service:
        await ask(service, ids, 1)
        await settle(service)
    async with service_on(bundled_model(), **SETTINGS) as service:
        recall = service.engine.budgets.recall
        assert recall is not None
        row = recall.space.layout.token_bytes
        recall.space = replace(recall.space, bytes_max=400 * row, disk_bytes_max=disk_bytes)
        question = np.concatenate([ids, some_ids(40, 9)])
        answer = await ask(service, question, 40, live=LIVE)
        assert answer.finish.reuse.warm > 800
        assert service.engine.stats()["recall_disk_bytes"] < 100 * row
        assert len((await the_chat(service)).offloaded) > len(question)
        await settle(service)
    assert 0 < max(peaks) < 400


async def check_dropped(service: EmbeddedService) -> None:
    """The dropped files of a chat are counted while it is live and while it is parked, and not longer."""
    engine = service.engine
    live = service.tiers.stats()["dropped_bytes"]
    assert live > 700 * engine.core.layout.token_bytes // 2
    await inside(service, engine.parts.scheduler.room.evict_one)
    assert engine.stats()["parked_sequences"] == 1
    assert service.tiers.stats()["dropped_bytes"] == live
    await inside(service, engine.budgets.parked.clear)
    gc.collect()
    assert service.tiers.stats()["dropped_bytes"] == 0


@pytest.mark.parametrize("n_layer", [28, 32])
def test_a_large_model_recalls_at_default_settings(tmp_path: Path, n_layer: int) -> None:
    """Llama 3.2 3B and 3.1 8B on 16 GiB: a context of 32k tokens whole, a part of it without a disk."""
    plane = Plane(BY_NAME["f16"].ggml_type, BY_NAME["f16"].row_bytes(8 * 128))
    layout = KVLayout((plane,) * n_layer, (plane,) * n_layer)
    n_ram = (1 << 34) * Config().recall_bytes // ram_bytes()
    budget, settings = LiveBudget("icecache", 2048), Config(threads=1)
    config = served(budget, settings)
    live_set = BoundedSet.whole(budget, 0, 32768, config)
    for n_disk, least in ((4 * n_ram, 32768), (0, 3 * budget.tokens)):
        space = OffloadSpace(layout, 128, n_ram, n_disk, tmp_path, DailyWrites(tmp_path))
        assert space.n_max(live_set) >= least
        assert space.why_nothing(live_set, 32768) is None
    too_little = OffloadSpace(layout, 128, 1 << 27, 0, tmp_path, DailyWrites(tmp_path))
    why = too_little.why_nothing(live_set, 32768)
    assert why is not None
    (needed,) = map(int, re.findall(r"(\d+)M would hold as many again", why))
    enough = OffloadSpace(layout, 128, needed << 20, 0, tmp_path, DailyWrites(tmp_path))
    assert enough.n_max(live_set) >= 2 * budget.tokens
