"""Requests that leave, fail or end while rows behind changed text come into a slot."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import numpy as np
import pytest
from moved import NOTHING
from moved_slots import (
    AFTER,
    BEFORE,
    HEAD,
    MOVED_FROM,
    N_MOVED,
    N_RUN,
    NEW,
    REST,
    RUN,
    allow,
    n_same,
    settled,
)
from sidecar_tools import OpenSidecar, SteadyCosts, ask, prompt
from waiting import until_async

from towerd.engine.llama_server.process.upstream_client import SlotAction
from towerd.errors import InvalidRequest, StoreError
from towerd.tiers.moved_limits import BLOCK_TOKENS
from towerd.tokens import Ids


async def test_a_client_that_leaves_while_runs_are_moved(sidecar_on: OpenSidecar) -> None:
    """Its slot is free again, with what was put into it."""
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        hold = sidecar.engine.holds.hold
        leaving = asyncio.create_task(hold(AFTER, "local", run_tokens_min=64))
        await until_async(lambda: sidecar.engine.holds.upkeep.n_preparing > 0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        _, done = await ask(sidecar, AFTER)
        assert done.reuse.approximate > N_MOVED / 2
        assert done.timings.prompt_n == done.reuse.prefill
        assert sidecar.engine.stats()["running"] == 0


async def test_a_chat_that_is_deleted_while_its_next_turn_is_moved(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it comes back with what its slot holds."""
    async with sidecar_on() as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        first = prompt(60, 7)
        _, done = await ask(sidecar, first, 4, session="gone")
        await settled(sidecar)
        longer = np.concatenate([first, np.array(done.ids, np.int32), NEW, RUN, REST])
        upstream = sidecar.engine.upstream
        at, go = asyncio.Event(), asyncio.Event()
        restore = upstream.restore

        async def slow(slot: int, name: str) -> SlotAction:
            at.set()
            await go.wait()
            return await restore(slot, name)

        monkeypatch.setattr(upstream, "restore", slow)
        asking = asyncio.create_task(ask(sidecar, longer, 4, session="gone"))
        await at.wait()
        await asyncio.to_thread(sidecar.store.delete_session, "gone", "local")
        go.set()
        await asking
        captured = sidecar.engine.stats()["captured_tokens"]
        await settled(sidecar)
        assert sidecar.engine.stats()["captured_tokens"] == captured


async def test_a_client_that_leaves_before_anything_is_moved(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot's record says what it holds still, behind the beginning of the prompt too."""
    longer = np.concatenate([HEAD, prompt(60, 55)])
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        _, done = await ask(sidecar, longer, 2)
        await settled(sidecar)
        runs, loop, at, go = (
            sidecar.engine.runs,
            asyncio.get_running_loop(),
            asyncio.Event(),
            Event(),
        )
        find = runs.find

        def slow(*asked: Any) -> Any:
            loop.call_soon_threadsafe(at.set)
            go.wait(60)
            return find(*asked)

        monkeypatch.setattr(runs, "find", slow)
        leaving = asyncio.create_task(sidecar.engine.holds.hold(AFTER, "local", run_tokens_min=64))
        await at.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        go.set()
        await until_async(lambda: not sidecar.engine.stats()["running"])
        (view,), (held,) = sidecar.engine.slots(), await sidecar.engine.upstream.slots()
        assert view.n_tokens == held["n_prompt_tokens"] == len(longer) + len(done.ids) - 1


async def test_what_was_not_checked_when_the_client_left(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block tells nothing, so what was put behind it stays only with the second one."""
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar, NOTHING)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        hold, upstream = sidecar.engine.holds.hold, sidecar.engine.upstream
        restore = upstream.restore

        async def last(slot: int, name: str) -> SlotAction:
            done = await restore(slot, name)
            leaving.cancel()
            await asyncio.wait((leaving,))
            return done

        monkeypatch.setattr(upstream, "restore", last)
        leaving = asyncio.create_task(hold(AFTER, "local", run_tokens_min=64))
        await asyncio.wait((leaving,))
        assert leaving.cancelled()
        monkeypatch.undo()
        await until_async(lambda: not sidecar.engine.stats()["running"])
        _, done = await ask(sidecar, AFTER, 4, reuse_tokens_min=N_RUN + 10)
        assert (done.reuse.approximate, done.timings.cache_n) == (0, MOVED_FROM)
        await settled(sidecar)
        assert sidecar.tiers.stats()["moved_bytes"] == 0


async def test_a_client_that_leaves_while_the_changed_text_is_evaluated(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server need not finish that."""
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        upstream, is_cancelled = sidecar.engine.upstream, False
        at, end = asyncio.Event(), asyncio.Event()

        async def endless(*_: Any) -> int:
            nonlocal is_cancelled
            at.set()
            try:
                await end.wait()
            except asyncio.CancelledError:
                is_cancelled = True
                raise
            return 0

        monkeypatch.setattr(upstream, "evaluate", endless)
        leaving = asyncio.create_task(sidecar.engine.holds.hold(AFTER, "local", run_tokens_min=64))
        await at.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        try:
            await until_async(lambda: is_cancelled)
        finally:
            end.set()
        await until_async(lambda: not sidecar.engine.stats()["running"])
        monkeypatch.undo()
        (view,), (held,) = sidecar.engine.slots(), await upstream.slots()
        assert view.n_tokens == held.get("n_prompt_tokens", 0) == 0
        _, done = await ask(sidecar, AFTER)
        assert done.reuse.moved == N_MOVED


async def test_a_client_that_leaves_before_llama_server_has_its_request(
    sidecar_on: OpenSidecar,
) -> None:
    """It shared the changed text alone, so the slot may have the moved rows behind it still."""
    whole = np.concatenate([NEW, RUN, REST])
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        _, done = await ask(sidecar, whole, 4)
        assert done.reuse.moved == N_MOVED
        await settled(sidecar)
        # So quick that nothing is restored in place of what is live.
        sidecar.engine.holds.placer.policy.costs = SteadyCosts(prefill_ms=0.05)
        async with await sidecar.engine.holds.hold(np.concatenate([NEW, REST]), "local") as hold:
            assert hold.reuse.live == len(NEW)
        _, exact = await ask(sidecar, np.append(whole, 300), 4, may_move=False)
        assert exact.timings.cache_n <= len(NEW) + BLOCK_TOKENS
        await settled(sidecar)
        assert await asyncio.to_thread(n_same, sidecar, whole, len(NEW)) == 0


@pytest.mark.parametrize("what", ["save", "put"])
async def test_what_fails_on_the_way_is_evaluated(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """llama-server refuses a step, or another request came into the slot: the store has the rest."""
    async with sidecar_on() as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        upstream = sidecar.engine.upstream
        evaluate, restore = upstream.evaluate, upstream.restore
        n_restored = 0

        async def other(ids: Ids, slot: int, lora: Any = ()) -> int:
            return await evaluate(np.append(ids[:-1], 300), slot, lora)

        async def refuse(slot: int, name: str) -> SlotAction:
            nonlocal n_restored
            n_restored += 1
            if n_restored == 2:
                raise InvalidRequest("no")
            return await restore(slot, name)

        if what == "save":
            monkeypatch.setattr(upstream, "evaluate", other)
        else:
            monkeypatch.setattr(upstream, "restore", refuse)
        _, done = await ask(sidecar, AFTER)
        assert (done.reuse.moved, done.reuse.approximate) == (0, 0)
        assert done.reuse.prefill == done.timings.prompt_n == len(AFTER) - len(HEAD)
        assert done.reuse.hot == len(HEAD)
        monkeypatch.undo()
        _, again = await ask(sidecar, np.concatenate([HEAD, prompt(33, 8), RUN, REST]))
        assert again.reuse.moved >= N_MOVED


async def test_what_cannot_be_looked_for_costs_nothing(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is live stays; after some failures in a row nothing is looked for until the next start."""
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        chat, n_failed = prompt(60, 44), 0

        def fail(*_: Any) -> None:
            nonlocal n_failed
            n_failed += 1
            raise StoreError("no")

        monkeypatch.setattr(sidecar.engine.runs, "find", fail)
        _, done = await ask(sidecar, chat, 2)
        for i in range(5):
            chat = np.concatenate([chat, np.array(done.ids, np.int32), prompt(66, i)])
            _, done = await ask(sidecar, chat, 2, reuse_tokens_min=64)
            assert done.timings.cache_n == done.reuse.live > 60
        assert n_failed == 3


async def test_a_slot_that_lost_what_was_evaluated_on_the_way(sidecar_on: OpenSidecar) -> None:
    """It is noticed, although the client is told the same: all of its prompt was evaluated for it."""
    ids = np.concatenate([NEW, RUN, REST])
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar, NOTHING)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        async with await sidecar.engine.holds.hold(ids, "local", run_tokens_min=64) as hold:
            assert hold.evaluated[0] > 0
            hold.observe(0, 10.0)
        stats = sidecar.engine.stats()
        assert stats["live_missed"] + stats["restores_missed"] == 1


async def test_an_engine_waits_for_what_is_moved(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request runs to its end within the time to end."""
    async with sidecar_on(parallel=1) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        upstream, at, go = sidecar.engine.upstream, asyncio.Event(), asyncio.Event()
        evaluate = upstream.evaluate

        async def slow(*asked: Any) -> int:
            at.set()
            await go.wait()
            return await evaluate(*asked)

        monkeypatch.setattr(upstream, "evaluate", slow)
        asking = asyncio.create_task(ask(sidecar, AFTER, 2))
        await at.wait()
        is_idle = sidecar.engine.holds.all_ended.is_set()
        drained = asyncio.create_task(sidecar.engine.drain(60))
        go.set()
        _, done = await asking
        await drained
        assert not is_idle
        assert done.reuse.moved == N_MOVED
