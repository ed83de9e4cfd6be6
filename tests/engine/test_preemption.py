"""Where cells are short: who may begin beside whom, and what a request keeps that gives way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Answer, Oracle, ask, check_greedy, inside, some_ids
from services import EmbeddedService, OpenService
from waiting import until_async

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.engine.base import GenerateRequest, LiveBudget
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model
from towerd.tiers import composer

SHAPE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)
EVERY = 32
"""Tokens between state checkpoints here."""
FULL = {"ctx_size": 1024, "live_tokens": 1024, "parallel": 8, "checkpoint_tokens": EVERY}
SMALL = FULL | {"ctx_size": 512, "live_tokens": 512}
END = 4
"""<|im_end|> of the synthetic vocabulary."""


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen35", "mamba"])
def arch(request: pytest.FixtureRequest) -> str:
    """One of each kind of memory: rows, rows behind a window, rows and a state, a state alone."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{arch}.gguf"
    make_random_gguf(path, replace(SHAPE, arch=arch))  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[Oracle]:
    made = Oracle(model)
    yield made
    made.close()


def message(n: int, seed: int) -> list[int]:
    """Ordinary tokens and the end of a message."""
    return [*np.random.default_rng(seed).integers(300, 448, n - 1).tolist(), END]


async def settle(service: EmbeddedService) -> None:
    """Wait until everything recorded is stored; check that all counts agree."""
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    if service.engine.checkpoint_tier is not None:
        await asyncio.to_thread(service.engine.checkpoint_tier.flush)
    await inside(service, service.engine.pool.check_integrity)
    await asyncio.to_thread(service.store.check_integrity)


async def forget_live(service: EmbeddedService) -> None:
    service.engine.forget_live()
    await inside(service, lambda: None)


async def together(service: EmbeddedService, prompts: list[Any], n: int, **fields: Any) -> Any:
    return await asyncio.gather(*(ask(service, prompt, n, **fields) for prompt in prompts))


def n_decoded(service: EmbeddedService) -> int:
    return int(service.engine.stats()["tokens_decoded"])


def n_preemptions(service: EmbeddedService) -> int:
    return int(service.engine.stats()["preemptions"])


# ---- who may begin ---------------------------------------------------------------------------


async def test_agents_whose_prompts_do_not_fit_together(
    service_on: OpenService, model: Path, oracle: Oracle
) -> None:
    """They take turns: nobody evaluates what is stored, and nobody has to give way."""
    shared = message(50, 0)
    prompts = [shared + message(250, i) for i in range(1, 6)]
    async with service_on(model, **SMALL) as service:
        await together(service, prompts, 1)
        await settle(service)
        longer = [[*prompt, 300 + i] for i, prompt in enumerate(prompts)]
        answers: list[Answer] = await together(service, longer, 4)
        for prompt, answer in zip(longer, answers, strict=True):
            assert answer.finish.reuse.prefill <= EVERY + 2
            check_greedy(oracle, prompt, answer.ids)
        assert n_preemptions(service) == 0
        await settle(service)


async def test_agents_that_share_most_of_their_prompts(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they share is counted once, so that they run side by side."""
    shared, most = some_ids(600), 0
    prompts = [np.concatenate([shared, some_ids(40, i)]) for i in range(1, 6)]
    async with service_on(bundled_model(), **FULL) as service:
        scheduler, restorer = service.engine.scheduler, service.engine.parts.restorer
        advanced = restorer.advanced

        def watched(job: Job) -> None:
            nonlocal most
            most = max(most, len(scheduler.active))
            advanced(job)

        monkeypatch.setattr(restorer, "advanced", watched)
        answers: list[Answer] = await together(service, prompts, 20)
        assert most == 5
        assert sum(answer.finish.reuse.prefill for answer in answers) == 600 + 5 * 40
        assert n_preemptions(service) == 0
        await settle(service)


async def test_small_requests_do_not_pass_a_large_one_for_ever(service_on: OpenService) -> None:
    """A few may begin before it, where it does not fit beside one that runs; then it is its turn.
    One that fills the context alone runs alone."""
    settings = FULL | {"parallel": 3}
    order: list[str] = []

    async def asked(service: EmbeddedService, name: str, ids: Any, n: int) -> None:
        await ask(service, ids, n, scope=name)
        order.append(name)

    async with service_on(bundled_model(), **settings) as service:
        running = asyncio.create_task(asked(service, "running", some_ids(30), 250))
        await until_async(lambda: service.engine.stats()["decode_steps"] > 5)
        others = [asked(service, "large", some_ids(1020), 3)]
        others += [asked(service, f"small {i}", some_ids(20, i), 2) for i in range(30)]
        await asyncio.gather(running, *others)
        assert order.index("large") == order.index("running") + 1
        assert order.index("large") <= 1 + 8
        await settle(service)


async def test_replies_that_outgrow_the_context(service_on: OpenService) -> None:
    """Nobody knows how long replies get, so all begin; who gives way does so a few times, evaluates
    nothing again, and says what it says alone."""
    prompts = [some_ids(40, i) for i in range(4)]
    async with service_on(bundled_model(), **SMALL) as service:
        alone = [(await ask(service, prompt, 200, scope="alone")).ids for prompt in prompts]
        n = n_decoded(service)
        answers: list[Answer] = await together(service, prompts, 200, scope="beside")
        assert [answer.ids for answer in answers] == alone
        assert 0 < n_preemptions(service) <= 4 * 3
        assert n_decoded(service) - n == 4 * (40 + 200 - 1)
        await settle(service)


# ---- who gives way ---------------------------------------------------------------------------

WHEN = {
    JobPhase.LOADING: lambda job: job.phase is JobPhase.LOADING,
    JobPhase.PREFILL: lambda job: job.phase is JobPhase.PREFILL and job.n_live >= 300,
    JobPhase.DECODE: lambda job: len(job.reply) == 5,
}


def preempting(
    service: EmbeddedService,
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[[Job], bool],
    then: Callable[[Job], None] = lambda job: None,
) -> None:
    """Preempt a job once, between two steps or two pieces of rows, as soon as `when` says so."""
    scheduler, restorer = service.engine.scheduler, service.engine.parts.restorer
    advanced, load = restorer.advanced, restorer.load
    is_done = False

    def preempt(job: Job) -> None:
        nonlocal is_done
        if not is_done and job.seq is not None and when(job):
            is_done = True
            scheduler.room.preempt()
            then(job)

    def watched(job: Job) -> None:
        advanced(job)
        scheduler.call(lambda: preempt(job))

    def loading(job: Job, on_loaded: Any) -> None:
        n_pieces = 0

        def tell(job: Job, loaded: Any) -> None:
            nonlocal n_pieces
            n_pieces += 1
            if n_pieces == 2 or getattr(loaded, "checkpoint", None) is not None:
                scheduler.call(lambda: preempt(job))
            on_loaded(job, loaded)

        load(job, tell)

    monkeypatch.setattr(restorer, "advanced", watched)
    monkeypatch.setattr(restorer, "load", loading)


def in_pieces(service: EmbeddedService, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Have stored rows come `n` tokens at a time."""
    bytes_max = max(1, n * service.tiers.layout.token_bytes)
    monkeypatch.setattr(composer, "BLOB_BYTES", bytes_max)


@pytest.mark.parametrize("phase", list(WHEN))
async def test_a_request_that_gives_way(
    service_on: OpenService,
    model: Path,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    phase: JobPhase,
) -> None:
    """It continues from the best of what it had and what is stored, whatever it was doing."""
    stored = message(200, 1)
    prompt = stored + message(200, 2)
    small = {"batch_size": 64, "ubatch_size": 64}
    async with service_on(model, **FULL, **small) as service:
        await ask(service, stored, 1)
        await settle(service)
        await forget_live(service)
        in_pieces(service, monkeypatch, 64)
        preempting(service, monkeypatch, WHEN[phase])
        n = n_decoded(service)
        answer = await ask(service, prompt, 12)
        assert n_preemptions(service) == 1
        reuse = answer.finish.reuse
        assert reuse.live + reuse.hot + reuse.warm + reuse.prefill == len(prompt)
        assert reuse.hot + reuse.warm >= len(stored) - 1
        assert n_decoded(service) - n == reuse.prefill + len(answer.ids) - 1
        check_greedy(oracle, prompt, answer.ids)
        await settle(service)


async def test_what_is_shared_stays_shared(
    service_on: OpenService, model: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes back shares the cells of its prefix with others again."""
    shared, used = message(300, 3), 0
    prompts = [shared + message(40, 4), shared + message(40, 5)]
    async with service_on(model, **FULL) as service:
        await ask(service, shared, 1)
        preempting(service, monkeypatch, lambda job: len(job.reply) == 10)
        scheduler, restorer = service.engine.scheduler, service.engine.parts.restorer
        advanced = restorer.advanced

        def watched(job: Job) -> None:
            nonlocal used
            advanced(job)
            if job.n_preempted and len(scheduler.active) == 2:
                used = service.engine.pool.cells_used

        monkeypatch.setattr(restorer, "advanced", watched)
        await together(service, prompts, 20)
        assert n_preemptions(service) == 1
        n_shares = 3 if arch == "mamba" else 1  # a state has no cells to share
        assert 0 < used <= n_shares * 300 + 2 * (40 + 20)
        await settle(service)


async def test_another_request_with_the_same_tokens_is_ahead(
    service_on: OpenService, model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one behind gives way, and comes back with its own state: that of the other is of a later
    position."""
    prompt = message(200, 6)
    ahead: list[Job] = []

    def is_behind(job: Job) -> bool:
        first, *others = sorted(service.engine.scheduler.active, key=lambda one: one.t_submit)
        ahead[:] = [first]
        return bool(others) and job is others[-1] and len(job.reply) == 6

    async with service_on(model, **FULL) as service:
        preempting(service, monkeypatch, is_behind)
        first = asyncio.create_task(ask(service, prompt, 300))
        await until_async(lambda: bool(ahead) and len(ahead[0].reply) > 20)
        answer = await ask(service, prompt, 30)
        assert n_preemptions(service) == 1
        check_greedy(oracle, prompt, answer.ids)
        assert answer.ids == (await first).ids[: len(answer.ids)]
        await settle(service)


async def test_a_client_that_leaves_while_its_request_waits_again(
    service_on: OpenService, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was evaluated for it is stored, and found by the next request."""
    prompt = message(400, 6)
    async with service_on(model, **FULL) as service:
        generation = service.engine.generate(GenerateRequest(np.array(prompt), n_predict=50))
        assert generation.job is not None

        def leave(job: Job) -> None:
            job.cancelled = True

        preempting(service, monkeypatch, WHEN[JobPhase.DECODE], leave)
        finish = None
        async for event in generation:
            finish = event
        assert finish is not None
        assert finish.n_cached >= len(prompt)  # type: ignore[union-attr]
        service.store.insert(np.array(prompt, np.int32), "local", [len(prompt)])
        generation.release()
        await settle(service)
        again = await ask(service, prompt, 2)
        assert again.finish.reuse.prefill <= EVERY


async def test_a_turn_that_fails_takes_no_other_with_it(
    service_on: OpenService, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continued in the sequence of a turn before it, whose rows were not stored yet."""
    async with service_on(model, **FULL) as service:
        scheduler, restorer = service.engine.scheduler, service.engine.parts.restorer
        monkeypatch.setattr(scheduler.room, "export_one", lambda: False)
        first = message(300, 7)
        reply = (await ask(service, first, 4)).ids
        second = first + reply + message(20, 8)
        advanced = restorer.advanced

        def fail(job: Job) -> None:
            raise TowerdError("no")

        monkeypatch.setattr(restorer, "advanced", fail)
        with pytest.raises(TowerdError):
            await ask(service, second, 4)
        monkeypatch.setattr(restorer, "advanced", advanced)
        if service.engine.checkpoint_tier is not None:
            await asyncio.to_thread(service.engine.checkpoint_tier.flush)
        again = await ask(service, second, 4)
        assert again.finish.reuse.prefill <= 20 + 1


@pytest.mark.parametrize("policy", ["streaming", "icecache"])
async def test_a_long_chat_that_gives_way_while_it_is_loaded(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """It loads the rest of what it may load."""
    settings = FULL | {"retention": policy, "live_budget": 128}
    live = LiveBudget(policy, 128)
    async with service_on(bundled_model(), **settings) as service:
        await ask(service, some_ids(400), 1)
        await settle(service)
        prompt = np.concatenate([some_ids(400), some_ids(10, 1)])
        await ask(service, prompt, 4, live=live)
        await settle(service)
        await forget_live(service)
        plain = await ask(service, prompt, 4, live=live)
        await settle(service)
        await forget_live(service)
        in_pieces(service, monkeypatch, 64)
        preempting(service, monkeypatch, WHEN[JobPhase.LOADING])
        found = await ask(service, prompt, 4, live=live)
        assert n_preemptions(service) == 1
        assert found.finish.reuse.prefill == plain.finish.reuse.prefill
        await settle(service)
