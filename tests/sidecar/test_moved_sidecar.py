"""Rows behind changed text in the slots of a real llama-server: composed, checked, labelled, stored."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import requests
from daemon import Daemon
from moved import ANYTHING, NOTHING, difference, moved_logprobs
from oracle import Answer, Oracle, TokenProbs
from real_models import smollm2
from real_text import CLOCK, RIVER
from services import opener
from sidecar_tools import OpenSidecar, Sidecar, SteadyCosts, ask, prompt, running_again
from waiting import until, until_async

from towerd.engine.base import Finish
from towerd.engine.llama_server.process.upstream_client import SlotAction
from towerd.errors import InvalidRequest, StoreError
from towerd.models.bundled import bundled_model
from towerd.tiers.moved_limits import BLOCK_TOKENS, MovedLimits, block_offsets, save_moved_limits
from towerd.tokens import Ids, Provenance

NOISE = 0.01
"""What log-probabilities over the same rows may differ by, without flash attention on both sides."""
N_RUN = 300
HEAD, OLD, NEW = prompt(20, 1), prompt(30, 2), prompt(45, 3)
RUN, REST = prompt(N_RUN, 4), prompt(9, 5)
BEFORE, AFTER = np.concatenate([HEAD, OLD, RUN]), np.concatenate([HEAD, NEW, RUN, REST])
N_CHECKED = BLOCK_TOKENS * len(block_offsets(N_RUN))
N_MOVED = N_RUN - N_CHECKED
MOVED_FROM = len(HEAD) + len(NEW) + BLOCK_TOKENS
"""Where the first moved row of AFTER is: the run's first tokens are evaluated again."""


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(bundled_model())
    yield made
    made.close()


def allow(sidecar: Sidecar, limits: MovedLimits = ANYTHING) -> None:
    """Set what deviations have to stay under."""
    assert sidecar.engine.why_not_movable == ""
    sidecar.tiers.moved_limits = limits


async def moved(sidecar: Sidecar) -> Finish:
    """A reply from moved rows, and what it was made of."""
    allow(sidecar)
    await ask(sidecar, BEFORE)
    _, done = await ask(sidecar, AFTER)
    assert done.reuse.moved == N_MOVED
    return done


async def settled(sidecar: Sidecar) -> None:
    await sidecar.engine.settle()
    await asyncio.to_thread(sidecar.tiers.flush)


def whole(done: Finish) -> Ids:
    """AFTER and its reply."""
    return np.concatenate([AFTER, np.array(done.ids, np.int32)])


def values(sidecar: Sidecar, ids: Ids) -> np.ndarray:
    """The last layer's values of the stored rows of `ids`, uint8[n, row_bytes]."""
    plan = sidecar.tiers.plan(sidecar.store.hold(ids, "local"), 0)
    assert plan.n == len(ids)
    return np.concatenate([rows.token_major().v[-1] for _, rows in sidecar.tiers.rows(plan)])


def n_same(sidecar: Sidecar, ids: Ids, at: int) -> int:
    """How many stored rows of the run that begins at `at` in `ids` are those of BEFORE."""
    old, new = values(sidecar, BEFORE)[-N_RUN:], values(sidecar, ids)[at : at + N_RUN]
    return int((new == old).all(axis=1).sum())


async def probabilities(sidecar: Sidecar, ids: Ids, n_min: int) -> Answer:
    """A reply in a slot that the engine prepared for it, with its log-probabilities."""
    async with await sidecar.engine.holds.hold(ids, "local", run_tokens_min=n_min) as hold:
        body: dict[str, Any] = {"prompt": ids, "id_slot": hold.slot, "n_predict": 8, "n_probs": 2}
        body |= {"temperature": 0.0, "ignore_eos": True}
        said = await sidecar.engine.upstream.post("/completion", body)
        assert said["timings"]["cache_n"] >= hold.reuse.moved
    probs = [TokenProbs(p["id"], p["logprob"], {}) for p in said["completion_probabilities"]]
    return Answer([each.id for each in probs], probs, Finish("limit", "", (), 0, None, None), "")  # type: ignore[arg-type]


async def test_a_run_is_kept_behind_changed_text(sidecar_on: OpenSidecar) -> None:
    """What changed is evaluated, and blocks of the run; everything that is said of the request says so."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        reuse, timings = done.reuse, done.timings
        assert (reuse.checked, reuse.refused) == (N_CHECKED, 0)
        assert reuse.approximate == N_MOVED
        assert reuse.live + reuse.hot + reuse.warm == len(HEAD) + N_MOVED
        assert reuse.prefill == len(NEW) + N_CHECKED + len(REST)
        assert (timings.cache_n, timings.prompt_n) == (len(HEAD) + N_MOVED, reuse.prefill)
        assert f"moved={N_MOVED},checked={N_CHECKED}" in reuse.header()
        assert reuse.drift is not None
        stats = sidecar.engine.stats()
        assert (stats["tokens_moved"], stats["tokens_move_checked"]) == (N_MOVED, N_CHECKED)
        assert (stats["restores_missed"], stats["live_missed"]) == (0, 0)


async def test_the_answer_is_that_of_the_moved_rows(
    sidecar_on: OpenSidecar, oracle: Oracle
) -> None:
    """The same rows in a context of llama.cpp give the same log-probabilities, and prefill others."""
    async with sidecar_on(flash_attn="off") as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        answer = await probabilities(sidecar, AFTER, 64)
        source, at = len(HEAD) + len(OLD), len(HEAD) + len(NEW)
        expected = moved_logprobs(oracle, BEFORE, AFTER, source, at, N_RUN, answer)
        assert difference(expected, answer) <= NOISE
        tokens = np.concatenate([AFTER, np.array(answer.ids[:-1], np.int32)])
        exact = oracle.logprobs(tokens, len(AFTER) - 1)
        assert difference(exact, answer) > 2 * NOISE


@pytest.mark.parametrize("flash_attn", ["on", "off"])
async def test_the_moved_rows_are_those_of_the_old_prompt(
    sidecar_on: OpenSidecar, flash_attn: str
) -> None:
    """Their values to the bit, also where a state has them transposed; those of blocks are new."""
    async with sidecar_on(flash_attn=flash_attn) as sidecar:
        await moved(sidecar)
        await settled(sidecar)
        old, new = [await asyncio.to_thread(values, sidecar, ids) for ids in (BEFORE, AFTER)]
        at, source = len(HEAD) + len(NEW), len(HEAD) + len(OLD)
        same = (new[at : at + N_RUN] == old[source : source + N_RUN]).all(axis=1)
        evaluated = np.zeros(N_RUN, np.bool_)
        for offset in block_offsets(N_RUN):
            evaluated[offset : offset + BLOCK_TOKENS] = True
        assert np.array_equal(same, ~evaluated)


async def test_a_run_that_deviates_is_evaluated(sidecar_on: OpenSidecar, oracle: Oracle) -> None:
    async with sidecar_on(flash_attn="off") as sidecar:
        allow(sidecar, NOTHING)
        await ask(sidecar, BEFORE)
        _, done = await ask(sidecar, AFTER, 1)
        reuse = done.reuse
        assert (reuse.moved, reuse.checked) == (0, 2 * BLOCK_TOKENS)  # the first tells nothing
        assert (reuse.refused, reuse.approximate) == (N_MOVED, 0)
        assert done.timings.prompt_n == reuse.prefill == len(AFTER) - len(HEAD)
        answer = await probabilities(sidecar, AFTER, 0)
        tokens = np.concatenate([AFTER, np.array(answer.ids[:-1], np.int32)])
        assert difference(oracle.logprobs(tokens, len(AFTER) - 1), answer) <= NOISE
        await settled(sidecar)
        assert sidecar.tiers.stats()["moved_bytes"] == 0


async def test_a_run_is_cut_where_it_deviates(sidecar_on: OpenSidecar, tiny_model: Path) -> None:
    """What came before stays, the rest is evaluated."""
    async with sidecar_on(tiny_model) as sidecar:
        await ask(sidecar, BEFORE)
        for slope in np.geomspace(1e-4, 10, 60).tolist():
            allow(sidecar, MovedLimits("", 0.0, 0.0, slope))
            ids = np.concatenate([HEAD, prompt(45, int(1e6 * slope)), RUN, REST])
            _, done = await ask(sidecar, ids, 2)
            reuse = done.reuse
            assert reuse.moved + reuse.refused == N_MOVED
            assert done.timings.cache_n == len(ids) - reuse.prefill
            if reuse.moved and reuse.refused:
                break
        else:
            pytest.fail("no limits cut a run in the middle")


async def test_who_gets_none(sidecar_on: OpenSidecar) -> None:
    """Other tenants, requests that ask for none or for longer runs; before anything was measured."""
    async with sidecar_on() as sidecar:
        await ask(sidecar, BEFORE)
        _, unmeasured = await ask(sidecar, AFTER)
        assert (unmeasured.reuse.moved, unmeasured.reuse.checked) == (0, 0)
        allow(sidecar)
        asked: list[dict[str, Any]] = [{"may_move": False}, {"cache_prompt": False}]
        asked += [{"reuse_tokens_min": 0}, {"reuse_tokens_min": N_RUN + 10}, {"scope": "bob"}]
        for i, fields in enumerate(asked):
            ids = np.concatenate([HEAD, prompt(45, 50 + i), RUN, REST])
            _, done = await ask(sidecar, ids, 2, **fields)
            assert (done.reuse.moved, done.reuse.approximate) == (0, 0), fields


@pytest.mark.parametrize("settings", [{"fidelity": "exact"}, {"cache_reuse": 0}])
async def test_a_daemon_that_keeps_none(sidecar_on: OpenSidecar, settings: dict[str, Any]) -> None:
    async with sidecar_on(**settings) as sidecar:
        assert sidecar.engine.why_not_movable
        sidecar.tiers.moved_limits = ANYTHING
        await ask(sidecar, BEFORE)
        _, done = await ask(sidecar, AFTER)
        assert (done.reuse.moved, done.reuse.prefill) == (0, len(AFTER) - len(HEAD))


async def test_a_model_with_windows_has_prefixes_alone(
    sidecar_on: OpenSidecar, window_model: Path
) -> None:
    async with sidecar_on(window_model) as sidecar:
        assert "sliding-window" in sidecar.engine.why_not_movable
        sidecar.tiers.moved_limits = ANYTHING
        await ask(sidecar, BEFORE)
        _, done = await ask(sidecar, AFTER)
        assert (done.reuse.moved, done.reuse.checked) == (0, 0)


async def test_rows_that_only_another_slot_has(sidecar_on: OpenSidecar) -> None:
    """It is saved first: the chat's last turn may have ended a moment ago."""
    async with sidecar_on() as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        assert sidecar.engine.stats()["saves"] == 0
        _, done = await ask(sidecar, np.concatenate([NEW, RUN, REST]))
        assert done.reuse.moved == N_MOVED
        assert done.slot != 0


async def test_runs_that_cost_more_to_bring_are_evaluated(sidecar_on: OpenSidecar) -> None:
    async with sidecar_on() as sidecar:
        allow(sidecar)
        sidecar.engine.holds.placer.policy.costs = SteadyCosts(prefill_ms=0.03)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        _, done = await ask(sidecar, AFTER)
        assert (done.reuse.moved, done.reuse.checked, done.reuse.refused) == (0, 0, 0)


async def test_limits_come_from_the_store(sidecar_on: OpenSidecar, tmp_path: Path) -> None:
    """What the embedded engine measured of the same rows."""
    async with sidecar_on() as sidecar:
        assert sidecar.tiers.moved_limits is None
    async with opener(tmp_path)(bundled_model(), ctx_size=512) as service:
        await asyncio.to_thread(save_moved_limits, service.store, NOTHING)
    async with sidecar_on() as sidecar:
        assert sidecar.tiers.moved_limits == NOTHING


async def test_a_chat_resumes_from_moved_rows(sidecar_on: OpenSidecar) -> None:
    """They are stored as what they are, and found after a restart by those who take them."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        longer = np.concatenate([whole(done), prompt(5, 6)])
        _, again = await ask(sidecar, longer, 1)
        assert again.reuse.live == again.timings.cache_n >= len(AFTER)
        assert again.reuse.approximate >= N_MOVED
        await settled(sidecar)
    async with sidecar_on() as sidecar:
        allow(sidecar)
        nodes = sidecar.store.match(longer, "local").nodes
        assert {n.worst_file for n in nodes if n.p0 < MOVED_FROM} == {Provenance.EXACT}
        assert {n.worst_file for n in nodes if n.p0 >= MOVED_FROM} == {Provenance.AFTER_MOVED}
        _, none = await ask(sidecar, longer, 1, may_move=False)
        assert (none.reuse.approximate, none.timings.cache_n) == (0, MOVED_FROM)
        for node in sidecar.store.match(AFTER, "local").nodes:
            assert node.worst_hot == Provenance.EXACT or node.worst_file is not None
    async with sidecar_on() as sidecar:
        _, done = await ask(sidecar, np.append(longer, 300), 1)
        assert done.timings.cache_n == len(longer)
        assert done.reuse.approximate == 0  # they were evaluated meanwhile


async def test_an_exact_request_does_not_continue_in_a_slot_with_moved_rows(
    sidecar_on: OpenSidecar,
) -> None:
    async with sidecar_on(parallel=1) as sidecar:
        done = await moved(sidecar)
        longer = np.concatenate([whole(done), prompt(5, 6)])
        _, exact = await ask(sidecar, longer, 1, may_move=False)
        assert (exact.reuse.approximate, exact.reuse.moved) == (0, 0)
        assert exact.timings.cache_n <= MOVED_FROM
        _, again = await ask(sidecar, np.append(longer, 300), 1)
        assert (again.reuse.approximate, again.timings.cache_n) == (0, len(longer))
        await settled(sidecar)
        assert sidecar.tiers.stats()["moved_bytes"] == 0


async def test_a_ram_cache_gets_no_moved_rows(sidecar_on: OpenSidecar) -> None:
    """llama-server would bring them back for any request: those that are stored are not restored."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        await settled(sidecar)
    longer = np.concatenate([whole(done), prompt(5, 6)])
    async with sidecar_on(None, "--cache-ram", "64", parallel=1) as sidecar:
        assert "RAM cache" in sidecar.engine.why_not_movable
        _, resumed = await ask(sidecar, longer, 2)
        assert (resumed.reuse.approximate, resumed.timings.cache_n) == (0, MOVED_FROM)
        await ask(sidecar, prompt(200, 90), 2)
        _, exact = await ask(sidecar, np.append(longer, 300), 2, may_move=False)
        assert exact.reuse.approximate == 0
        await settled(sidecar)
        assert sidecar.tiers.stats()["moved_bytes"] == 0
        at = len(HEAD) + len(NEW)
        assert await asyncio.to_thread(n_same, sidecar, AFTER, at) == 0


async def test_moved_rows_are_not_moved_once_more(sidecar_on: OpenSidecar) -> None:
    async with sidecar_on() as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        for i in range(4):
            ids = np.concatenate([HEAD, prompt(40, 60 + i), RUN, REST])
            _, done = await ask(sidecar, ids)
            # and not the tokens behind the run, which are no longer exact
            assert done.reuse.moved == N_MOVED


async def test_llama_server_is_killed(sidecar_on: OpenSidecar) -> None:
    """A chat with moved rows goes on from what was saved of it."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        await settled(sidecar)
        process = sidecar.engine.backend.process
        assert process is not None
        assert process.pid is not None
        again = asyncio.create_task(running_again(sidecar))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        await again
        longer = np.concatenate([whole(done), prompt(5, 6)])
        _, restored = await ask(sidecar, longer)
        assert restored.timings.cache_n == restored.reuse.hot >= len(AFTER)
        assert restored.reuse.approximate >= N_MOVED
        _, other = await ask(sidecar, np.concatenate([HEAD, prompt(33, 8), RUN, REST]))
        assert other.reuse.moved == N_MOVED


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


async def test_several_at_once(sidecar_on: OpenSidecar) -> None:
    """Each gets the run, with more of them than slots, and none what another has in its slot."""
    async with sidecar_on(parallel=3, ctx_size=2048) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        prompts = [np.concatenate([HEAD, prompt(30, 50 + i), RUN, REST]) for i in range(6)]
        asked = await asyncio.gather(*(ask(sidecar, ids) for ids in prompts))
        assert [done.reuse.moved for _, done in asked] == [N_MOVED] * 6
        stats = sidecar.engine.stats()
        assert (stats["restores_missed"], stats["restores_failed"]) == (0, 0)
        assert stats["tokens_moved"] == 6 * N_MOVED


async def test_an_answer_knows_what_changed(sidecar_on: OpenSidecar) -> None:
    """SmolLM2, with limits as measured on it: a few tokens are evaluated, and the answer has the new name."""
    limits = MovedLimits("", 0.0024, 0.030, 1.0)
    line = "The directory is /home/"
    texts = [f"{line}{name}.\n\n{CLOCK}\n\n{RIVER}\n\n{line}" for name in ("ann", "bob")]
    async with sidecar_on(smollm2(), ctx_size=2048) as sidecar:
        allow(sidecar, limits)
        tokenize = sidecar.engine.tokenize
        before, after = [
            await tokenize(text, add_special=True, parse_special=True) for text in texts
        ]
        await ask(sidecar, before, 1)
        text, done = await ask(sidecar, after, 8)
        assert text.startswith("bob")
        assert done.reuse.moved > len(after) / 2
        exact, _ = await ask(sidecar, after, 8, cache_prompt=False)
        assert exact.startswith("bob")


async def test_killed_and_resumed(
    sidecar_on: OpenSidecar, make_sidecar: Callable[..., Daemon]
) -> None:
    """A daemon says what it moved; killed at once, it finds again what it had stored."""
    daemon = make_sidecar()
    async with sidecar_on(store_dir=daemon.store_dir) as sidecar:
        await asyncio.to_thread(save_moved_limits, sidecar.store, ANYTHING)
        await ask(sidecar, BEFORE)

    def asked(ids: Ids, **fields: Any) -> requests.Response:
        body = {"prompt": ids.tolist(), "n_predict": 4, "temperature": 0, **fields}
        reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
        assert reply.ok, reply.text
        return reply

    def talk() -> None:
        daemon.start()
        new = np.concatenate([HEAD, prompt(45, 9), RUN, REST])
        reply = asked(new)
        assert f"moved={N_MOVED},checked={N_CHECKED}" in reply.headers["X-Towerd-Reuse"]
        timings = reply.json()["timings"]
        assert timings["cache_n"] == len(HEAD) + N_MOVED
        until(lambda: f"moved={N_MOVED}" in daemon.log)
        daemon.kill_both()
        daemon.start()
        again = asked(new)  # some of it may have been written
        assert "approx=" in again.headers["X-Towerd-Reuse"]
        assert again.json()["timings"]["prompt_n"] <= timings["prompt_n"]
        none = asked(AFTER, n_cache_reuse=0)
        assert "moved" not in none.headers["X-Towerd-Reuse"]

    await asyncio.to_thread(talk)
