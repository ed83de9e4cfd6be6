"""A frozen conversation continues as if it had never been frozen, on the real engine."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from oracle import GREEDY, Answer, ask
from services import EmbeddedService, OpenService
from waiting import until_async

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import Coding
from towerd.engine.base import Finish, GenerateRequest, LiveBudget, Progress, Started
from towerd.errors import ConfigError, NotFound
from towerd.models.bundled import bundled_model
from towerd.store.sessions.frozen import SessionBusy
from towerd.tokens import Ids

BASE = list(range(100, 180))
"""What several chats begin with."""
HYBRID = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", arch="lfm2"
)
END_OF_MESSAGE = 4


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    if service.engine.checkpoint_tier is not None:
        await asyncio.to_thread(service.engine.checkpoint_tier.flush)
    await asyncio.to_thread(service.store.check_integrity)


def words(n: int, seed: int) -> list[int]:
    """What a user says; of ordinary tokens, and an end."""
    return [*np.random.default_rng(seed).integers(300, 440, n - 1).tolist(), END_OF_MESSAGE]


async def chat(service: EmbeddedService, session: str | None, *, freeze: bool) -> list[Answer]:
    """Four turns; between them the session is frozen, or not."""
    prompt, answers = [1, *BASE, *words(30, 1)], []
    for n in range(4):
        answers.append(await ask(service, prompt, session=session))
        name = answers[-1].finish.session
        prompt = prompt + answers[-1].ids + words(20, n + 2)
        await settle(service)
        if freeze:
            froze = await service.cold.freeze(name)
            assert froze is not None
            assert froze.removed
            await settle(service)
            # what is live would hide that the rows are gone
            for seq in list(service.engine.pool):
                service.engine.pool.drop(seq)
    return answers


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "lfm2.gguf"
    make_random_gguf(path, HYBRID)
    return path


@pytest.fixture(params=["dense", "hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    is_dense = request.param == "dense"
    return bundled_model() if is_dense else request.getfixturevalue("hybrid_model")


@pytest.mark.parametrize("session", ["my chat", None])
async def test_the_same_tokens_as_never_frozen(
    service_on: OpenService, model: Path, session: str | None
) -> None:
    """Named or recognised by its tokens: the same session, greedy tokens, turns; what others begin
    with is kept with its rows, the rest was frozen, and the reuse says so."""
    fields: dict[str, Any] = {"checkpoint_tokens": 32, "live_sequences": 1, "parallel": 1}
    async with service_on(model, "never", **fields) as service:
        await ask(service, [1, *BASE, *words(9, 90)])
        expected = await chat(service, session, freeze=False)
    async with service_on(model, "often", **fields) as service:
        await ask(service, [1, *BASE, *words(9, 90)])
        found = await chat(service, session, freeze=True)
        assert [answer.ids for answer in found] == [answer.ids for answer in expected]
        (name,) = {answer.finish.session for answer in found}
        for before, answer in zip(found, found[1:], strict=False):
            reuse, n_known = answer.finish.reuse, before.finish.n_cached
            n_reused = reuse.live + reuse.hot + reuse.warm
            assert len(BASE) + 1 >= n_reused > len(BASE) // 3
            assert reuse.cold == n_known - n_reused
            assert reuse.header().endswith(f",cold={reuse.cold}")
        assert [turn.current for turn in service.store.turns(name)] == [True] * 4
        stats = service.cold.stats()
        assert (stats["freezes"], stats["thaws"], stats["frozen_sessions"]) == (4, 3, 1)
        assert stats["cold_bytes"] == service.store.session(name).cold_bytes < 700
        assert service.cold.n_failed == 0
        report = service.store.verify()
        assert report.ok, report.problems


async def test_it_survives_a_restart(service_on: OpenService) -> None:
    """A frozen session of an earlier run is recognised by its tokens alone."""
    prompt = [1, *words(60, 3)]
    async with service_on(bundled_model()) as service:
        first = await ask(service, prompt)
        name = first.finish.session
        await settle(service)
        await service.cold.freeze(name)
        assert service.store.stats()["segments"] == 0
        assert service.store.stats()["disk_bytes"] == 0
    longer = prompt + first.ids + words(10, 4)
    async with service_on(bundled_model()) as service:
        assert (await service.cold.session_ids(name)).tolist() == prompt + first.ids
        assert service.store.session(name).cold_bytes
        other = await ask(service, prompt[:30] + words(9, 5))
        assert other.finish.session != name
        assert other.finish.reuse.cold == 0
        assert service.store.session(name).cold_bytes
        again = await ask(service, longer)
        assert again.finish.session == name
        assert again.finish.reuse.cold > 30  # `other` begins with the rest
        assert service.store.session(name).cold_bytes == 0


class Held:
    """The codec of a service, to be had only once `open` is set."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding
        self.asked, self.open = threading.Event(), threading.Event()

    @property
    def codec(self) -> Codec:
        self.asked.set()
        self.open.wait()
        return self.coding.codec

    def close(self) -> None:
        self.coding.close()


@asynccontextmanager
async def thawing(service_on: OpenService) -> AsyncIterator[tuple[EmbeddedService, Held, Ids]]:
    """A service whose session "s" is frozen and has no live rows, what holds up its thawing, and a
    prompt that continues it."""
    prompt = [1, *words(200, 6)]
    async with service_on(bundled_model(), batch_size=32) as service:
        first = await ask(service, prompt, session="s")
        await settle(service)
        await service.cold.freeze("s")
        for seq in list(service.engine.pool):
            service.engine.pool.drop(seq)
        held = Held(service.cold.coding)
        service.cold.coding = cast(Coding, held)
        try:
            yield service, held, np.array(prompt + first.ids + words(40, 7), np.int32)
        finally:
            held.open.set()


async def test_the_prompt_is_evaluated_while_its_session_thaws(service_on: OpenService) -> None:
    """All of it, before a token is decoded; the answer begins when the session is thawed."""
    async with thawing(service_on) as (service, held, ids):
        request = GenerateRequest(
            ids=ids, fields=GREEDY, n_predict=3, session="s", return_progress=True
        )
        events, n_seen = service.sessions.run(request), 0
        async for event in events:
            assert isinstance(event, Progress)
            assert event.total == len(ids)
            assert event.processed >= n_seen
            n_seen = event.processed
            if n_seen == len(ids):
                break
        assert held.asked.is_set()
        assert service.store.session("s").cold_bytes
        started = asyncio.ensure_future(anext(events))
        await until_async(lambda: any(seq.n > len(ids) for seq in service.engine.pool))
        assert not started.done()
        held.open.set()
        start = await started
        assert isinstance(start, Started)
        finish = [event async for event in events][-1]
        assert isinstance(finish, Finish)
        for reuse in (start.reuse, finish.reuse):
            assert reuse.cold == len(ids) - 40 - 1
        assert service.store.session("s").cold_bytes == 0
        assert service.store.session_ids("s").tolist() == [*ids.tolist(), *finish.ids]


async def test_a_client_leaves_while_its_session_thaws(service_on: OpenService) -> None:
    """What was generated by then continues the session."""
    async with thawing(service_on) as (service, held, ids):
        request = GenerateRequest(ids=ids, fields=GREEDY, n_predict=3, session="s")
        client = asyncio.create_task(service.sessions.run_quietly(request))
        await asyncio.to_thread(held.asked.wait)
        await until_async(lambda: any(seq.n > len(ids) for seq in service.engine.pool))
        client.cancel()
        await asyncio.wait((client,))
        assert service.store.session("s").cold_bytes
        held.open.set()
        await service.sessions.drain()
        assert service.store.session("s").cold_bytes == 0
        assert service.store.session_ids("s").tolist()[: len(ids)] == ids.tolist()
        assert len(service.store.turns("s")) == 2


async def test_a_session_in_use_is_not_frozen(service_on: OpenService) -> None:
    """Neither by its name nor by its tokens, until its turn is recorded; another one is."""
    prompt = [1, *words(60, 8)]
    async with service_on(bundled_model()) as service:
        name = (await ask(service, prompt)).finish.session
        await ask(service, [1, *words(40, 9)], session="other")
        for session in (None, name):
            ids = np.array(prompt + words(5, 10), np.int32)
            request = GenerateRequest(ids=ids, fields=GREEDY, n_predict=400, session=session)
            run = service.sessions.run(request)
            await anext(run)
            with pytest.raises(SessionBusy, match="in use"):
                await service.cold.freeze(name)
            assert service.store.session(name).cold_bytes == 0
            await cast(Any, run).aclose()
            await service.sessions.drain()
        assert await service.cold.freeze("other") is not None
        assert await service.cold.freeze(name) is not None
        assert await service.cold.freeze(name) is None
        with pytest.raises(NotFound):
            await service.cold.freeze("missing")


async def freeze_and_open(service: EmbeddedService, session: str) -> None:
    """Frozen with nothing live, then opened by a client: thawed ahead."""
    await service.cold.freeze(session)
    for seq in list(service.engine.pool):
        service.engine.pool.drop(seq)
    assert service.cold.ahead is not None
    service.cold.ahead.opened(session, "local")
    await service.cold.ahead.idle()


async def test_thawed_ahead(service_on: OpenService) -> None:
    """Opened, its rows are there before the next prompt comes."""
    prompt = [1, *words(120, 11)]
    async with service_on(bundled_model()) as service:
        first = await ask(service, prompt, session="s")
        await settle(service)
        await freeze_and_open(service, "s")
        assert service.store.session("s").cold_bytes == 0
        assert service.cold.stats()["thaws_ahead"] == 1
        next_one = await ask(service, prompt + first.ids + words(9, 12), session="s")
        assert next_one.finish.reuse.prefill <= 12
        assert next_one.finish.reuse.cold == 0


async def test_a_frozen_chat_that_is_expected_back_is_thawed_ahead(
    service_on: OpenService,
) -> None:
    """The policy knows it by a segment that freezing removed."""
    prompt = [1, *words(120, 11)]
    async with service_on(bundled_model()) as service:
        first = await ask(service, prompt, session="s")
        await settle(service)
        end = service.store.turns("s")[-1].reply_node
        await service.cold.freeze("s")
        for seq in list(service.engine.pool):
            service.engine.pool.drop(seq)
        assert service.cold.ahead is not None
        await asyncio.to_thread(service.cold.ahead.expected_back, end)
        await asyncio.sleep(0)
        await service.cold.ahead.idle()
        assert service.store.session("s").cold_bytes == 0
        next_one = await ask(service, prompt + first.ids + words(9, 12), session="s")
        assert next_one.finish.reuse.prefill <= 12


async def test_thawed_ahead_within_its_budget(service_on: OpenService) -> None:
    """A chat with a live budget is evaluated in full, as its next prompt would be, which continues."""
    prompt = [1, *words(200, 11)]
    live = LiveBudget("streaming", 64)
    settings = {"retention": "streaming", "live_budget": 64}
    async with service_on(bundled_model(), **settings) as service:
        first = await ask(service, prompt, session="s", live=live)
        await settle(service)
        await freeze_and_open(service, "s")
        assert service.cold.stats()["thaws_ahead"] == 1
        follow_up = prompt + first.ids + words(9, 12)
        next_one = await ask(service, follow_up, session="s", live=live)
        assert next_one.finish.reuse.prefill <= 12
        assert service.engine.pool.cells_used <= 64
        await settle(service)


async def test_another_table_is_named(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob that needs what is not here says what; nothing is changed by the attempt."""
    async with service_on(bundled_model()) as service:
        await ask(service, [1, *words(200, 15)], session="s")
        await service.cold.freeze("s")
        monkeypatch.setattr("towerd.codec.forms.fallback.Packed.model", b"\1" * 8)
        with pytest.raises(Exception, match="use the version of towerd that wrote it"):
            await service.cold.thaw("s")
        monkeypatch.undo()
        assert await service.cold.thaw("s")


def test_reuse_without_cold_is_as_before() -> None:
    from towerd.engine.base import Reuse

    assert Reuse(1, 2, 3, 4).header() == "live=1,hot=2,warm=3,prefill=4"
    assert replace(Reuse(prefill=4), cold=3).header() == "live=0,hot=0,warm=0,prefill=4,cold=3"


async def test_a_student_is_needed_once(service_on: OpenService, tmp_path: Path) -> None:
    """What was frozen with a codec model thaws in a daemon that does not have its file."""
    student = Path(shutil.copy(bundled_model(), tmp_path / "student.gguf"))
    with GgufVocabulary(student) as vocabulary:
        story = vocabulary.tokenize(b"Once upon a time, there was a little girl named Lily. " * 2)
    async with service_on(bundled_model(), codec_model=student) as service:
        await ask(service, [1, *story.tolist()], session="story")
        await settle(service)
        said = service.store.session_ids("story").tolist()
        assert await service.cold.freeze("story")
    assert list((tmp_path / "store" / "tables").glob("start-*.zst"))
    await asyncio.to_thread(student.unlink)
    async with service_on(bundled_model()) as service:
        assert await service.cold.thaw("story")
        assert service.store.session_ids("story").tolist() == said


async def test_a_codec_model_is_checked_at_start(service_on: OpenService, tmp_path: Path) -> None:
    student = tmp_path / "student.gguf"
    student.write_text("no model")
    with pytest.raises(ConfigError, match=f"^--codec-model: {student} is no mini model: .*GGUF"):
        async with service_on(bundled_model(), codec_model=student):
            pass
