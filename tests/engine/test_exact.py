"""Reuse equals monolithic prefill: resume, branch, sharing, restart, eviction, damage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle, ask, check_answer, check_integrity, settle
from services import EmbeddedService, OpenService

from towerd.engine.base import GenerateRequest, Piece
from towerd.tokens import Ids


def _prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(260, 500, n).astype(np.int32)


async def test_continue_a_live_chat(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """A second turn reuses the first one's live rows, all but the undecoded last token."""
    async with service_on(model_path) as service:
        prompt = _prompt(60)
        first = await ask(service, prompt)
        check_answer(oracle, prompt, first)
        longer = np.concatenate([prompt, first.ids, _prompt(10, 1)])
        second = await ask(service, longer)
        check_answer(oracle, longer, second)
        assert second.finish.reuse.live == 60 + 7
        assert second.finish.reuse.prefill == 11
        assert second.finish.session == first.finish.session
        await settle(service)


async def test_resume_after_restart(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """After a restart the history comes from the store; nothing of it is prefilled again."""
    prompt = _prompt(100)
    async with service_on(model_path) as service:
        first = await ask(service, prompt)
    async with service_on(model_path) as service:
        longer = np.concatenate([prompt, first.ids, _prompt(5, 1)])
        again = await ask(service, longer)
        check_answer(oracle, longer, again)
        assert again.finish.reuse.warm == 107
        assert again.finish.reuse.prefill == 6
        assert again.finish.session == first.finish.session
        await settle(service)


async def test_same_batches_give_the_same_bits(service_on: OpenService, model_path: Path) -> None:
    """Restored rows are the rows: with equal batch shapes the log-probabilities are equal.

    With flash attention, that is: without it where the cells lie decides how sums are rounded."""
    prompt = _prompt(90)
    async with service_on(model_path, flash_attn="on") as service:
        await ask(service, prompt, 1)
        live = await ask(service, prompt, 6)
        assert live.finish.reuse.live == 89
    async with service_on(model_path, flash_attn="on") as service:
        stored = await ask(service, prompt, 6)
        assert stored.finish.reuse.warm == 89
    assert live.ids == stored.ids
    assert live.probs == stored.probs


async def test_branches_share_their_base(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """Two chats over one base hold its cells once, live and on disk."""
    base = _prompt(120)
    async with service_on(model_path) as service:
        chats = [np.concatenate([base, _prompt(20, seed)]) for seed in (1, 2, 3)]
        for chat in chats:
            check_answer(oracle, chat, await ask(service, chat))
        assert service.engine.pool.cells_used == 120 + 3 * (20 + 7)
        await settle(service)
        rows = service.store.state.warm_bytes / service.engine.info.kv_bytes_per_token
        assert rows < 1.5 * (120 + 3 * 27) + 3 * 200  # page alignment of tiny planes


async def test_regenerate_and_edit_branch_the_same_session(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """Regenerating or editing a message continues the session on another branch."""
    async with service_on(model_path) as service:
        prompt = _prompt(50)
        first = await ask(service, prompt)
        turn = np.concatenate([prompt, first.ids, _prompt(20, 1)])
        second = await ask(service, turn)
        again = await ask(service, turn)
        assert again.finish.session == second.finish.session == first.finish.session
        assert again.finish.reuse.prefill == 1
        edited = np.concatenate([prompt, first.ids, _prompt(20, 2)])
        other = await ask(service, edited)
        check_answer(oracle, edited, other)
        assert other.finish.session == first.finish.session
        stored = await asyncio.to_thread(service.store.session_ids, first.finish.session)
        assert list(stored) == [*edited, *other.ids]
        await settle(service)


async def test_parallel_requests(service_on: OpenService, model_path: Path, oracle: Oracle) -> None:
    """Concurrent requests over one base do not disturb each other."""
    base = _prompt(64)
    chats = [np.concatenate([base, _prompt(10 + 7 * i, i + 1)]) for i in range(8)]
    async with service_on(model_path) as service:
        answers = await asyncio.gather(*(ask(service, chat, 12) for chat in chats))
        for chat, answer in zip(chats, answers, strict=True):
            check_answer(oracle, chat, answer)
        assert sum(a.finish.reuse.prefill for a in answers) < 64 + sum(len(c) - 63 for c in chats)
        await settle(service)


async def test_more_chats_than_live_cells(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """With a live context for three chats, twelve parallel ones still answer exactly."""
    chats = [_prompt(100 + i, i) for i in range(12)]
    async with service_on(model_path, live_tokens=512, ctx_size=256) as service:
        answers = await asyncio.gather(*(ask(service, chat, 40) for chat in chats))
        for chat, answer in zip(chats, answers, strict=True):
            check_answer(oracle, chat, answer)
        await settle(service)


async def test_damaged_rows_are_prefilled(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """A flipped bit in a segment file costs a prefill, never a wrong token or an error."""
    prompt = _prompt(80)
    async with service_on(model_path) as service:
        first = await ask(service, prompt)
        root = service.config.store_dir
    files = [f for f in root.rglob("*") if f.is_file() and f.read_bytes()[:6] == b"TWRSEG"]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 2, len(data), 64):  # rows or padding, surely some rows
            data[at] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
    async with service_on(model_path) as service:
        longer = np.concatenate([prompt, first.ids])
        again = await ask(service, longer)
        check_answer(oracle, longer, again)
        assert again.finish.reuse.warm == 0
        assert service.tiers.stats()["damaged_segments"] >= 1
        await settle(service)


async def test_closing_the_stream_keeps_what_was_generated(
    service_on: OpenService, model_path: Path
) -> None:
    """A client that leaves ends its request; the tokens so far are recorded and reusable."""
    async with service_on(model_path) as service:
        await _start_and_leave(service, _prompt(40))
        await service.sessions.drain()
        await settle(service)
        assert not service.engine.scheduler.active
        sessions = await asyncio.to_thread(service.store.sessions)
        assert len(sessions) == 1
        assert sessions[0].n_tokens >= 42


async def _start_and_leave(service: EmbeddedService, prompt: Ids) -> None:
    request = GenerateRequest(ids=prompt, n_predict=400)
    stream = service.sessions.run(request)
    pieces = 0
    async for event in stream:
        pieces += isinstance(event, Piece)
        if pieces == 3:
            break
    await stream.aclose()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
async def test_quantized_caches(service_on: OpenService, tiny_model: Path, kind: str) -> None:
    """Quantized cache types resume to the same bits."""
    prompt = _prompt(70)
    settings = {"cache_type_k": kind, "cache_type_v": kind}
    async with service_on(tiny_model, **settings) as service:
        await ask(service, prompt, 1)
        live = await ask(service, prompt, 6)
    async with service_on(tiny_model, **settings) as service:
        stored = await ask(service, prompt, 6)
        assert stored.finish.reuse.warm == 69
        await check_integrity(service)
    assert live.probs == stored.probs


async def test_flash_attention_off(service_on: OpenService, tiny_model: Path) -> None:
    """Transposed V rows are stored token-major and come back.

    Without flash attention llama.cpp's sums depend on where in the cache the cells lie, so the
    log-probabilities agree to rounding and not to the bit."""
    prompt = _prompt(70)
    async with service_on(tiny_model, flash_attn="off") as service:
        await ask(service, prompt, 1)
        live = await ask(service, prompt, 6)
    async with service_on(tiny_model, flash_attn="off") as service:
        stored = await ask(service, prompt, 6)
        assert stored.finish.reuse.warm == 69
    assert live.ids == stored.ids
    for a, b in zip(live.probs, stored.probs, strict=True):
        assert abs(a.logprob - b.logprob) < 1e-4
