"""Modules in a real service: spliced where they stand, labelled, and never taken for exact."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle, ask, settle, some_ids
from services import OpenService
from spliced import (
    GAP,
    KL,
    MODULE,
    N_KEPT,
    N_MODULE,
    NOISE,
    OTHER,
    PROMPT,
    REST,
    SPANS,
    add_module,
    check_prefill,
    check_spliced,
    difference,
    prefilled,
)
from waiting import until_async

from towerd.drift import Drift
from towerd.engine.base import GenerateRequest
from towerd.engine.embedded.calibration.measure import log_softmax
from towerd.engine.embedded.calibration.scratch import Scratch, SteppedSequence
from towerd.errors import NotSupported
from towerd.store.tree.module import Spans
from towerd.tokens import Ids


async def test_a_module_is_spliced_in(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """After a gap, its rows come from the store but for the tokens evaluated again; the reply
    says so, and is that of the same splice in a context of its own."""
    async with service_on(model_path) as service:
        await add_module(service)
        answer = await ask(service, PROMPT)
        reuse = answer.finish.reuse
        assert (reuse.hot + reuse.warm, reuse.approximate) == (N_KEPT, N_KEPT)
        assert reuse.live + reuse.prefill + N_KEPT == len(PROMPT)
        assert reuse.drift == Drift(KL, 0.0)
        assert reuse.header().endswith(f"approx={N_KEPT}")
        check_spliced(oracle, [GAP, (MODULE, SPANS)], REST, answer)
        # and that is not what prefill gives: the comparison sees a splice
        assert difference(prefilled(oracle, PROMPT, answer), answer) > 2 * NOISE
        longer = np.concatenate([PROMPT, np.array(answer.ids, np.int32), some_ids(5, 5)])
        again = await ask(service, longer)
        assert again.finish.reuse.live == len(PROMPT) + 7
        assert (again.finish.reuse.approximate, again.finish.reuse.drift) == (
            len(PROMPT) + 7 - len(GAP) - 16,  # from the first moved row on
            Drift(KL, 0.0),
        )
        await settle(service)


async def test_all_evaluated_again_is_prefill(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    async with service_on(model_path) as service:
        await add_module(service, spans=((0, N_MODULE),))
        answer = await ask(service, PROMPT)
        assert answer.finish.reuse.approximate == 0
        check_prefill(oracle, PROMPT, answer)
        await settle(service)


def test_rows_that_stay_and_rows_made_anew_are_one_prefill(oracle: Oracle) -> None:
    """The order of evaluation is exact: around rows that are what prefill computes there, the
    tokens in between come out as prefill computes them."""
    oracle.clear()
    scratch = Scratch(oracle.context, 1)
    whole = SteppedSequence(scratch)
    whole.decode(PROMPT)
    n = len(GAP)
    rows = whole.rows(n, n + N_MODULE)
    line = SteppedSequence(scratch)
    line.decode(GAP)
    at = n
    for p0, p1 in ((n + 10, n + 30), (n + 31, n + 90)):
        line.decode(PROMPT[at:p0])
        line.append(rows.slice(p0, p1))
        at = p1
    found = log_softmax(line.logits(PROMPT[at:]))
    expected = oracle.logprobs(PROMPT, at)
    assert np.abs(found - expected).max() <= NOISE


async def test_exact_reuse_wins(service_on: OpenService, tiny_model: Path) -> None:
    """What is live or stored as prefill computes it is not spliced, and takes the place of what
    was; a prompt that is precached never takes spliced rows over."""
    async with service_on(tiny_model) as service:
        await ask(service, PROMPT)
        await settle(service)
        await add_module(service)
        live = await ask(service, np.concatenate([PROMPT, REST]))
        assert live.finish.reuse.approximate == 0
        spliced = await ask(service, np.concatenate([some_ids(20, 9), PROMPT, REST]))
        assert spliced.finish.reuse.approximate == N_KEPT
        other = np.concatenate([some_ids(20, 9), PROMPT])
        stored = await ask(service, other, 0, precache="p")
        assert stored.finish.reuse.approximate == 0
        assert stored.finish.reuse.live < 20 + len(GAP) + N_MODULE
        await settle(service)
        after = await ask(service, np.concatenate([other, some_ids(9, 8)]))
        assert after.finish.reuse.approximate == 0
        assert after.finish.reuse.prefill <= 9
        await settle(service)


async def test_two_modules_in_one_prompt(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    async with service_on(model_path) as service:
        await add_module(service)
        await add_module(service, "o", OTHER, ((0, 8),), kl=KL / 2)
        prompt = np.concatenate([GAP, OTHER, REST, MODULE, REST])
        answer = await ask(service, prompt)
        assert answer.finish.reuse.approximate == N_KEPT + 52
        assert answer.finish.reuse.drift == Drift(1.5 * KL, 0.0)
        parts: list[Ids | tuple[Ids, Spans]] = [GAP, (OTHER, ((0, 8),)), REST, (MODULE, SPANS)]
        check_spliced(oracle, parts, REST, answer)
        # one right after the other, the first at the very beginning
        prompt = np.concatenate([MODULE, OTHER, MODULE, REST])
        answer = await ask(service, prompt)
        assert answer.finish.reuse.approximate == 2 * N_KEPT + 52
        parts = [(MODULE, SPANS), (OTHER, ((0, 8),)), (MODULE, SPANS)]
        check_spliced(oracle, parts, REST, answer)
        await settle(service)


async def test_a_module_at_the_end(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """Its last token is evaluated: restored rows carry no logits."""
    async with service_on(model_path) as service:
        await add_module(service)
        answer = await ask(service, PROMPT[: -len(REST)])
        assert answer.finish.reuse.approximate == N_KEPT - 1
        short = (MODULE[:-1], SPANS)
        check_spliced(oracle, [GAP, short], MODULE[-1:], answer)
        await settle(service)


async def test_a_module_that_is_partly_live(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """What is live of it stays; the rest is spliced."""
    async with service_on(model_path) as service:
        await ask(service, np.concatenate([GAP, MODULE[:30], some_ids(4, 7)]))
        await add_module(service)
        answer = await ask(service, PROMPT)
        assert answer.finish.reuse.live == len(GAP) + 30
        assert answer.finish.reuse.approximate == N_KEPT - 14
        spans: Spans = ((0, 30), (48, 56))
        check_spliced(oracle, [GAP, (MODULE, spans)], REST, answer)
        await settle(service)


async def test_requests_that_do_not_want_it(
    service_on: OpenService, tiny_model: Path, oracle: Oracle
) -> None:
    """cache_prompt: false, other texts, and modules that are gone."""
    async with service_on(tiny_model) as service:
        await add_module(service)
        answer = await ask(service, PROMPT, cache_prompt=False)
        assert answer.finish.reuse.prefill == len(PROMPT)
        changed = PROMPT.copy()
        changed[len(GAP) + 50] = 300 if changed[len(GAP) + 50] != 300 else 301
        assert (await ask(service, changed)).finish.reuse.approximate == 0
        service.store.bases.remove("m", "local")
        gone = await ask(service, np.concatenate([some_ids(9, 6), PROMPT]))
        assert gone.finish.reuse.approximate == 0
        await settle(service)


async def test_rows_that_are_gone_are_evaluated(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    async with service_on(model_path) as service:
        await add_module(service)
        for node in service.store.nodes():
            service.store.rows.drop_hot(node)
        for file in service.store.files():
            service.store.rows.drop_file(file)
        answer = await ask(service, PROMPT)
        assert answer.finish.reuse.prefill == len(PROMPT)
        assert (answer.finish.reuse.approximate, answer.finish.reuse.drift) == (0, None)
        check_prefill(oracle, PROMPT, answer)
        await settle(service)


async def test_tenants_do_not_share_modules(service_on: OpenService, tiny_model: Path) -> None:
    """But for public ones; and what is live of a splice belongs to whom it was made for."""
    async with service_on(tiny_model) as service:
        await add_module(service, scope="a")
        await add_module(service, "o", OTHER, ((0, 8),), public=True)
        prompt = np.concatenate([GAP, OTHER, REST, MODULE, REST])
        mine = await ask(service, prompt, scope="a")
        theirs = await ask(service, prompt, scope="b")
        assert mine.finish.reuse.approximate == N_KEPT + 52
        assert theirs.finish.reuse.approximate == 52
        assert theirs.finish.reuse.live == 0
        await settle(service)


async def test_preempted_in_the_middle(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """A request that gives way continues where it was, and keeps its label."""
    settings = {"live_tokens": 512, "ctx_size": 448, "batch_size": 32, "ubatch_size": 32}
    async with service_on(model_path, **settings) as service:
        await add_module(service)
        other = [ask(service, some_ids(100, 20 + i), 60) for i in range(2)]
        scheduler = service.engine.scheduler
        n_steps = scheduler.counters["decode_steps"]
        first = asyncio.gather(*other)
        await until_async(lambda: scheduler.counters["decode_steps"] > n_steps)
        answers = [ask(service, np.concatenate([some_ids(9, i), PROMPT]), 60) for i in range(2)]
        found = await asyncio.gather(*answers)
        await first
        assert scheduler.room.n_preemptions > 0
        for i, answer in enumerate(found):
            assert answer.finish.reuse.approximate == N_KEPT
            assert answer.finish.reuse.drift == Drift(KL, 0.0)
            check_spliced(oracle, [some_ids(9, i), GAP, (MODULE, SPANS)], REST, answer)
        await settle(service)


@pytest.mark.parametrize("n_events", [1, 3, 5])
async def test_cancelled_in_the_middle(
    service_on: OpenService, tiny_model: Path, oracle: Oracle, n_events: int
) -> None:
    """Nothing leaks, and the next request continues from what was live."""
    async with service_on(tiny_model, batch_size=8, ubatch_size=8) as service:
        await add_module(service)
        request = GenerateRequest(ids=PROMPT, n_predict=4, return_progress=True)
        generation = service.engine.generate(request)
        n = 0
        async for _ in generation:
            n += 1
            if n == n_events:
                break
        await generation.cancel()
        generation.release()
        await settle(service)
        answer = await ask(service, PROMPT)
        assert answer.finish.reuse.approximate == N_KEPT
        await settle(service)


async def test_exact_daemons_splice_nothing(service_on: OpenService, tiny_model: Path) -> None:
    async with service_on(tiny_model) as service:
        await add_module(service)
    async with service_on(tiny_model, fidelity="exact") as service:
        assert (await ask(service, PROMPT)).finish.reuse.approximate == 0
        maker = service.engine.modules
        assert maker is not None
        with pytest.raises(NotSupported, match="--fidelity exact"):
            maker.check(100)
        await settle(service)
