"""Anticipation on a real engine: the next turn pays for the user's words only, no request waits for
it, and what it evaluates is what the next prompt has."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from oracle import check_integrity, inside, job_for, settle
from services import EmbeddedService, OpenService
from waiting import until, until_async

from towerd.api.http.hints import Hints
from towerd.api.http.tenants import OWNER
from towerd.api.llama.task import parse_task
from towerd.engine.base import Finish, GenerateRequest, encode
from towerd.engine.embedded.context.context import Interrupted
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.models.bundled import bundled_model
from towerd.tokens import Ids

TEMPLATES = Path(__file__).resolve().parents[2] / "towerd" / "data" / "templates"
THINKS = 'root ::= "<think>\\n" [a-z ]{40} "</think>\\n\\n" [a-z ]{60}'
BEGUN = 'root ::= [a-z ]{40} "</think>\\n\\n" [a-z ]{60}'
QUESTION = [{"role": "user", "content": "What did the cat do?"}]
SETTINGS: dict[str, Any] = {
    "ctx_size": 1024,
    "live_tokens": 4096,
    "threads": 1,
    "parallel": 4,
}


async def chat(
    service: EmbeddedService,
    messages: list[dict[str, str]],
    grammar: str = THINKS,
    n_predict: int = 400,
    session: str | None = None,
) -> tuple[dict[str, str], Finish]:
    """The message and the Finish of one chat request."""
    body = {"messages": messages, "max_tokens": n_predict, "temperature": 0, "grammar": grammar}
    hints, engine = Hints(session), service.engine
    task = await parse_task("chat", encode(body), OWNER, hints, engine, service.config)
    finish = await service.sessions.run_quietly(await task.request_of(0))
    assert finish is not None
    reply = json.loads(await task.final(0, finish))
    return reply["choices"][0]["message"], finish


def said(reply: dict[str, str], back: str) -> list[dict[str, str]]:
    """As most clients send it back: without the thinking."""
    answer = {"role": "assistant", "content": reply["content"]}
    return [*QUESTION, answer, {"role": "user", "content": back}]


async def anticipated(service: EmbeddedService) -> None:
    """What is evaluated ahead has been."""
    await until_async(lambda: service.sessions.stats()["anticipations_running"] == 0)


@pytest.mark.parametrize(
    ("template", "grammar"), [("Qwen3", THINKS), ("DeepSeek-R1-Distill", BEGUN)]
)
async def test_the_next_turn_pays_for_new_words_only(
    service_on: OpenService, template: str, grammar: str
) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    evaluated: dict[bool, int] = {}
    replies: dict[bool, dict[str, str]] = {}
    for is_on in (True, False):
        values = SETTINGS | {"chat_template": source, "anticipate": is_on}
        async with service_on(bundled_model(), **values) as service:
            reply, finish = await chat(service, QUESTION, grammar, session=f"s{is_on}")
            assert reply["reasoning_content"]
            assert finish.stop == "eos"
            if is_on:
                await anticipated(service)
            await settle(service)
            messages = said(reply, "And then?")
            replies[is_on], finish = await chat(service, messages, grammar, session=f"s{is_on}")
            evaluated[is_on] = finish.reuse.prefill
            if is_on:
                stats = service.sessions.stats()
                assert stats["anticipated_tokens_used"] == stats["anticipated_tokens"] > 50
                assert stats["anticipated_tokens_wasted"] == 0
                await settle(service)
                await check_integrity(service)
        # a store of its own for the other run
        for path in sorted(service.config.store_dir.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    assert replies[True] == replies[False]
    assert evaluated[False] > 2 * evaluated[True]
    assert evaluated[True] < 40


async def test_a_template_that_keeps_answers_costs_nothing(service_on: OpenService) -> None:
    """Where the next prompt begins with the tower as it is, nothing is evaluated ahead."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        before = service.engine.stats()["tokens_decoded"]
        _, finish = await chat(service, QUESTION, "", 20)
        await anticipated(service)
        spent = service.engine.stats()["tokens_decoded"] - before
        assert spent <= finish.reuse.prefill + 20
        assert service.sessions.stats()["anticipated_tokens"] == 0


async def test_it_gives_way_at_once(service_on: OpenService) -> None:
    """A request that comes while a background prompt runs ends it, and has the use of it."""
    ids = np.random.default_rng(1).integers(260, 500, 900).astype(np.int32)
    async with service_on(bundled_model(), **SETTINGS) as service:
        quiet = GenerateRequest(ids=ids, n_predict=0, background=True)
        running = asyncio.create_task(service.sessions.run_quietly(quiet))
        await asyncio.to_thread(until, lambda: service.engine.stats()["tokens_decoded"] > 0)
        loud = GenerateRequest(ids=np.append(ids, 7).astype(np.int32), n_predict=1)
        finish = await service.sessions.run_quietly(loud)
        early = await running
        assert early is not None
        assert finish is not None
        assert early.stop == "cancelled"
        assert 0 < early.n_cached < 900
        assert finish.reuse.live == early.n_cached
        assert finish.reuse.prefill == 901 - early.n_cached
        await settle(service)
        await check_integrity(service)


async def test_an_interrupted_step_leaves_nothing(service_on: OpenService) -> None:
    """A request that comes in the middle of a step ends it; when the step is taken again, its rows
    and logits have the bits that they have without the interruption."""
    ids = np.random.default_rng(3).integers(260, 500, 200).astype(np.int32)
    async with service_on(bundled_model(), **SETTINGS) as service:
        scheduler = service.engine.scheduler
        context, pool, background = scheduler.context, scheduler.pool, scheduler.background

        def step(seq: LiveSeq, part: Ids, *, is_hurried: bool) -> npt.NDArray[np.float32]:
            """The logits after evaluating `part` as a background job's step."""
            job = job_for(GenerateRequest(ids=ids, background=True), seq=seq)
            index = context.batch.add(part, seq.n, seq.id, logits_last=True)
            with background.interruptible([job]):
                if is_hurried:
                    background.interrupt()
                context.decode()
            pool.append(seq, part)
            return context.logits(index).copy()

        def taken(*, interrupted: bool) -> list[npt.NDArray[Any]]:
            """Logits and rows of a sequence that lies in the same cells each time: on some CPUs
            the last bits depend on where the rows of a sequence lie."""
            seq = pool.open("local", len(ids))
            step(seq, ids[:120], is_hurried=False)
            if interrupted:
                before = context.get_state(seq.id)
                with pytest.raises(Interrupted):
                    step(seq, ids[120:], is_hurried=True)
                assert np.array_equal(context.get_state(seq.id), before)
            logits = step(seq, ids[120:], is_hurried=False)
            rows = service.engine.core.memory.rows(seq.id, 0, len(ids))
            assert rows is not None
            planes = [plane.copy() for plane in (*rows.k, *rows.v)]
            pool.drop(seq)
            return [logits, *planes]

        def both_ways() -> None:
            again, smoothly = (taken(interrupted=each) for each in (True, False))
            assert all(map(np.array_equal, again, smoothly))

        await inside(service, both_ways)
        await check_integrity(service)


async def test_it_never_pushes_anything_out(service_on: OpenService) -> None:
    """Without free cells it is not done at all; live conversations stay."""
    rng = np.random.default_rng(2)
    async with service_on(bundled_model(), **(SETTINGS | {"live_tokens": 1100})) as service:
        kept = GenerateRequest(ids=rng.integers(260, 500, 500).astype(np.int32), n_predict=1)
        await service.sessions.run_quietly(kept)
        await settle(service)
        used = service.engine.pool.cells_used
        quiet = GenerateRequest(
            ids=rng.integers(260, 500, 600).astype(np.int32), n_predict=0, background=True
        )
        finish = await service.sessions.run_quietly(quiet)
        assert finish is not None
        assert finish.n_cached == 0
        assert service.engine.pool.cells_used == used


async def test_what_is_not_used_is_counted(service_on: OpenService) -> None:
    """A client that edits its question instead; and one answer after the other in one session."""
    source = (TEMPLATES / "Qwen3.jinja").read_text()
    async with service_on(bundled_model(), **SETTINGS, chat_template=source) as service:
        await chat(service, QUESTION, session="s")
        await anticipated(service)
        first = service.sessions.stats()["anticipated_tokens"]
        assert first > 50
        edited = [{"role": "user", "content": "Where was the dog?"}]
        await chat(service, edited, session="s")
        stats = service.sessions.stats()
        assert stats["anticipated_tokens_wasted"] == first
        assert stats["anticipated_tokens_used"] == 0


async def test_the_budget_holds(service_on: OpenService) -> None:
    source = (TEMPLATES / "Qwen3.jinja").read_text()
    values = SETTINGS | {"chat_template": source, "anticipate_tokens_max": 20}
    async with service_on(bundled_model(), **values) as service:
        reply, _ = await chat(service, QUESTION)
        await anticipated(service)
        assert service.sessions.stats()["anticipated_tokens"] == 20
        await chat(service, said(reply, "And then?"))
        assert service.sessions.stats()["anticipated_tokens_used"] == 20


async def test_leaving_while_it_runs(service_on: OpenService) -> None:
    """The daemon may stop at any moment of it."""
    source = (TEMPLATES / "Qwen3.jinja").read_text()
    for _ in range(3):
        async with service_on(bundled_model(), **SETTINGS, chat_template=source) as service:
            await chat(service, QUESTION)
        assert service.sessions.stats()["anticipated_tokens_wasted"] == 0
