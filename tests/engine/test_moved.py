"""Rows behind changed text in a real service: kept where they stand, checked, labelled, made exact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moved import NOTHING, allow, difference, moved_logprobs
from oracle import Answer, Oracle, ask, settle, some_ids
from services import OpenService
from waiting import until_async

from towerd.engine.base import GenerateRequest, Progress
from towerd.engine.moving.moves import MovedPiece, MovedRows, Moves
from towerd.tiers.moved_limits import (
    BLOCK_TOKENS,
    MovedLimits,
    RunProfile,
    block_offsets,
    spread,
)
from towerd.tokens import Ids

NOISE = 0.01
"""What log-probabilities of the same evaluation in other batches and cells may differ by."""
N_RUN = 300
HEAD, OLD, NEW = some_ids(20, 1), some_ids(30, 2), some_ids(45, 3)
RUN, REST = some_ids(N_RUN, 4), some_ids(9, 5)
BEFORE, AFTER = np.concatenate([HEAD, OLD, RUN]), np.concatenate([HEAD, NEW, RUN, REST])
N_CHECKED = BLOCK_TOKENS * len(block_offsets(N_RUN))
N_MOVED = N_RUN - N_CHECKED


def exact(oracle: Oracle, prompt: Ids, answer: Answer) -> float:
    """The largest difference from monolithic prefill."""
    whole = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    return difference(oracle.logprobs(whole, len(prompt) - 1), answer)


async def test_a_run_is_kept_behind_changed_text(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """What changed is evaluated, and blocks of the run; its other rows are those of the old prompt, moved.
    The reply says so, and is that of the same in a context of its own."""
    async with service_on(model_path) as service:
        allow(service)
        await ask(service, BEFORE)
        answer = await ask(service, AFTER)
        reuse = answer.finish.reuse
        assert (reuse.moved, reuse.checked, reuse.refused) == (N_MOVED, N_CHECKED, 0)
        assert reuse.approximate == N_MOVED == reuse.hot + reuse.warm
        assert reuse.live == len(HEAD)
        assert reuse.live + reuse.hot + reuse.warm + reuse.prefill == len(AFTER)
        assert f"moved={N_MOVED},checked={N_CHECKED}" in reuse.header()
        assert reuse.drift is not None
        source, at = len(HEAD) + len(OLD), len(HEAD) + len(NEW)
        expected = moved_logprobs(oracle, BEFORE, AFTER, source, at, N_RUN, answer)
        assert difference(expected, answer) <= NOISE
        # and that is not what prefill gives: the comparison sees it
        assert exact(oracle, AFTER, answer) > 2 * NOISE
        await settle(service)


async def test_a_run_that_deviates_is_evaluated(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    async with service_on(model_path) as service:
        allow(service, NOTHING)
        await ask(service, BEFORE)
        answer = await ask(service, AFTER)
        reuse = answer.finish.reuse
        assert (reuse.moved, reuse.checked) == (0, 2 * BLOCK_TOKENS)  # the first tells nothing
        assert reuse.refused == N_MOVED
        assert reuse.prefill == len(AFTER) - len(HEAD)
        assert exact(oracle, AFTER, answer) <= NOISE
        await settle(service)


@pytest.mark.parametrize(("bound", "n_kept"), [(0.0, 0), (0.0099, 0), (0.0101, 3), (0.02, 3)])
def test_a_run_is_cut_where_it_deviates(bound: float, n_kept: int) -> None:
    """What came before the last stretch stays, if it may be kept by itself."""
    pieces = [MovedPiece(10, at - 8, at, at + 20, 5, at - 8, ()) for at in range(18, 158, 28)]
    profile = RunProfile(140, [0.3])
    moves = Moves(pieces, {10: profile})
    for _ in range(4):
        moves.attach(MovedRows(np.zeros(0), None, is_hot=True))  # type: ignore[arg-type]
        profile.deviations.append(0.1)

    dropped = moves.refuse(lambda run: spread(run, 0.0) <= bound)
    assert [piece.p0 for piece in moves.attached] == [18, 46, 74][:n_kept]
    assert [piece.p0 for piece in dropped] == [102, 74, 46, 18][: 4 - n_kept]
    assert moves.p0 is None
    assert moves.n_refused == 20 * (5 - n_kept)
    assert [(run.n, run.is_cut) for run in moves.measured] == [(84, True)] * bool(n_kept)


async def test_what_was_not_checked_does_not_stay(
    service_on: OpenService, tiny_model: Path
) -> None:
    """A client leaves when rows came that the next block would have told of: its retry has none of them."""
    async with service_on(tiny_model) as service:
        allow(service, NOTHING)
        await ask(service, BEFORE)
        for n_events in range(1, 6):
            prompt = np.concatenate([HEAD, some_ids(45, 100 + n_events), RUN, REST])
            request = GenerateRequest(
                prompt, n_predict=4, scope="local", reuse_tokens_min=64, return_progress=True
            )
            generation = service.engine.generate(request)
            async for event in generation:
                n_events -= isinstance(event, Progress)
                if n_events == 0:
                    generation.stop()
            generation.release()
            again = await ask(service, prompt)
            assert again.finish.reuse.approximate == 0
        await settle(service)


async def test_exact_fidelity_moves_nothing(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    async with service_on(model_path, fidelity="exact") as service:
        allow(service)
        await ask(service, BEFORE)
        answer = await ask(service, AFTER)
        assert (answer.finish.reuse.moved, answer.finish.reuse.checked) == (0, 0)
        assert exact(oracle, AFTER, answer) <= NOISE
        await settle(service)


@pytest.mark.parametrize(
    "fields", [{"may_move": False}, {"cache_prompt": False}, {"reuse_tokens_min": 0}]
)
async def test_a_request_may_refuse_moved_rows(
    service_on: OpenService, tiny_model: Path, fields: dict[str, Any]
) -> None:
    async with service_on(tiny_model) as service:
        allow(service)
        await ask(service, BEFORE)
        assert (await ask(service, AFTER, **fields)).finish.reuse.moved == 0
        longer = await ask(service, np.concatenate([HEAD, RUN[40:]]), reuse_tokens_min=N_RUN)
        assert longer.finish.reuse.moved == 0  # the run is shorter than that
        await settle(service)


async def test_other_tenants_rows_are_not_found(service_on: OpenService, tiny_model: Path) -> None:
    async with service_on(tiny_model) as service:
        allow(service)
        await ask(service, BEFORE, scope="alice")
        assert (await ask(service, AFTER, scope="bob")).finish.reuse.moved == 0
        await ask(service, some_ids(200, 9), 0, scope="public", precache="p")
        found = await ask(service, np.concatenate([NEW, some_ids(200, 9), REST]), scope="bob")
        assert found.finish.reuse.moved > 0
        await settle(service)


async def test_dropped_oldest_turns(service_on: OpenService, tiny_model: Path) -> None:
    """A frontend whose window is full drops the oldest turns: the rest keeps its rows."""
    async with service_on(tiny_model) as service:
        allow(service)
        turns = [some_ids(90, 20 + i) for i in range(5)]
        await ask(service, np.concatenate([HEAD, *turns]))
        kept = await ask(service, np.concatenate([HEAD, *turns[2:], REST]))
        n = 3 * 90
        assert kept.finish.reuse.moved == n - BLOCK_TOKENS * len(block_offsets(n))
        assert kept.finish.reuse.live == len(HEAD)
        await settle(service)


async def test_moved_rows_become_exact_in_idle_time(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """The next turn finds exact rows, and the drift of the answer was measured."""
    async with service_on(model_path) as service:
        allow(service)
        await ask(service, BEFORE)
        answer = await ask(service, AFTER)
        assert answer.finish.reuse.moved == N_MOVED
        stats = service.sessions.stats
        await until_async(lambda: stats()["moved_answers_measured"] == 1)
        assert stats()["moved_excess_mean"] > 0
        longer = np.concatenate([AFTER, np.array(answer.ids, np.int32), some_ids(5, 6)])
        again = await ask(service, longer)
        assert again.finish.reuse.approximate == again.finish.reuse.moved == 0
        assert again.finish.reuse.live >= len(AFTER)
        assert exact(oracle, longer, again) <= NOISE
        await settle(service)


async def test_a_deleted_chat_is_not_recorded_again(
    service_on: OpenService, tiny_model: Path
) -> None:
    """It was to be made exact when it was deleted."""
    async with service_on(tiny_model) as service:
        allow(service)
        await ask(service, BEFORE)
        answer = await ask(service, AFTER)
        assert answer.finish.reuse.moved == N_MOVED
        service.store.delete_session(answer.finish.session, "local")
        stats = service.sessions.stats
        await until_async(lambda: stats()["moved_answers_waiting"] == 0)
        await settle(service)
        service.store.gc()
        assert service.store.match(AFTER, "local").n == len(HEAD)


async def test_limits_tighten_when_answers_drift(service_on: OpenService, model_path: Path) -> None:
    async with service_on(model_path) as service:
        before = MovedLimits("", -1.0, 0.0, 0.0)  # any answer is far above such a floor
        allow(service, before)
        await ask(service, BEFORE)
        stats = service.sessions.stats
        for i in range(20):
            prompt = np.concatenate([HEAD, some_ids(60, 100 + i), RUN, REST])
            await ask(service, prompt)
            await until_async(lambda: stats()["moved_answers_waiting"] == 0)
            after = service.tiers.moved_limits
            assert after is not None
            if after.tightened < before.tightened:
                break
        else:
            pytest.fail("the limits were not tightened")
        await settle(service)


async def test_several_at_once(service_on: OpenService, tiny_model: Path) -> None:
    """Requests side by side, cancelled ones among them, leave the account of cells right."""
    async with service_on(tiny_model, live_tokens=4096) as service:
        allow(service)
        await ask(service, BEFORE)
        prompts = [np.concatenate([HEAD, some_ids(30, 50 + i), RUN, REST]) for i in range(6)]
        asked = [asyncio.create_task(ask(service, prompt)) for prompt in prompts]
        asked[3].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        moved = [each.finish.reuse.moved for each in answers if isinstance(each, Answer)]
        assert len(moved) == 5
        assert all(moved)
        await settle(service)


async def test_a_refused_run_ends_no_other_request(
    service_on: OpenService, tiny_model: Path
) -> None:
    """The run behind it is looked at as well."""
    second = some_ids(150, 14)
    async with service_on(tiny_model, ctx_size=1024, live_tokens=4096) as service:
        allow(service, NOTHING)
        await ask(service, np.concatenate([HEAD, OLD, RUN, some_ids(20, 50), second]))
        other = asyncio.create_task(ask(service, some_ids(100, 77), 60))
        prompt = np.concatenate([HEAD, NEW, RUN, some_ids(33, 7), second, REST])
        reuse = (await ask(service, prompt)).finish.reuse
        assert (reuse.moved, reuse.prefill) == (0, len(prompt) - len(HEAD))
        assert reuse.drift is None
        assert (await other).finish.stop == "limit"
        await settle(service)


async def test_moved_rows_are_not_moved_once_more(
    service_on: OpenService, tiny_model: Path
) -> None:
    """Each change keeps the exact rows, of which the first prompt's stay known."""
    async with service_on(tiny_model, anticipate=False) as service:
        allow(service)
        await ask(service, BEFORE)
        for i in range(6):
            prompt = np.concatenate([HEAD, some_ids(40, 60 + i), RUN, REST])
            reuse = (await ask(service, prompt)).finish.reuse
            assert (
                reuse.moved == N_MOVED
            )  # and not the tokens behind the run, which are no longer exact
        await settle(service)


async def test_a_chat_that_fills_the_context_becomes_exact(
    service_on: OpenService, tiny_model: Path
) -> None:
    """There is no room for it twice: its moved rows leave the context first."""
    run = some_ids(520, 44)
    async with service_on(tiny_model, ctx_size=1024, live_tokens=1024) as service:
        allow(service)
        await ask(service, np.concatenate([HEAD, OLD, run]))
        answer = await ask(service, np.concatenate([HEAD, NEW, run, REST]))
        assert answer.finish.reuse.moved > 300
        stats = service.sessions.stats
        await until_async(lambda: stats()["moved_answers_measured"] == 1)
        await settle(service)
        assert service.tiers.stats()["moved_bytes"] == 0


async def test_tenants_share_the_live_rows_of_a_base_from_the_store(
    service_on: OpenService, tiny_model: Path
) -> None:
    base = some_ids(200, 9)
    async with service_on(tiny_model) as service:
        await ask(service, base, 0, scope="public", precache="p")
        await settle(service)
        service.engine.forget_live()
        await ask(service, np.concatenate([base, some_ids(20, 1)]), scope="alice")
        theirs = await ask(service, np.concatenate([base, some_ids(20, 2)]), scope="bob")
        assert theirs.finish.reuse.live == len(base)
        await settle(service)


@pytest.mark.parametrize("asked", [{"reuse_tokens_min": 0}, {}])
async def test_who_asks_for_none_continues_from_none(
    service_on: OpenService, tiny_model: Path, asked: dict[str, Any]
) -> None:
    """Neither a request nor a daemon that was told so."""
    async with service_on(tiny_model, anticipate=False) as service:
        allow(service)
        await ask(service, BEFORE)
        answer = await ask(service, AFTER)
        longer = np.concatenate([AFTER, np.array(answer.ids, np.int32), REST])
        if asked:
            assert (await ask(service, longer, **asked)).finish.reuse.approximate == 0
        await settle(service)
    async with service_on(tiny_model, anticipate=False, cache_reuse=0) as service:
        assert (await ask(service, longer)).finish.reuse.approximate == 0
        await settle(service)
