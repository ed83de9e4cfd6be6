"""A client leaves in the very moment its answer is recorded: what was computed is kept."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import ask
from services import OpenService
from waiting import until_async

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.engine.base import GenerateRequest
from towerd.store.sessions.turn import Turn, TurnResult


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
async def test_a_client_that_leaves_while_its_turn_is_recorded(
    service_on: OpenService, tmp_path: Path, arch: str
) -> None:
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=4, arch=arch))  # type: ignore[arg-type]
    prompt = np.random.default_rng(1).integers(300, 448, 90).tolist()
    begun, may_outgrow = threading.Event(), threading.Event()
    async with service_on(path) as service:
        commit = service.store.commit_turn

        def slow_commit(turn: Turn) -> TurnResult:
            begun.set()
            may_outgrow.wait(30)
            return commit(turn)

        service.store.commit_turn = slow_commit  # type: ignore[method-assign]
        asking: asyncio.Task[Any] = asyncio.create_task(ask(service, prompt, 4))
        await asyncio.to_thread(begun.wait, 30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for _ in range(3):  # it has had the time to export
            await asyncio.wrap_future(service.engine.scheduler.call(lambda: None))
        may_outgrow.set()
    async with service_on(path) as service:
        (session,) = service.store.sessions()
        ids = service.store.session_ids(session.id)
        assert len(ids) == len(prompt) + 4
        again = await ask(service, [*ids.tolist(), 300], 2)
        reuse = again.finish.reuse
        assert reuse.warm == len(ids) - 1


async def test_a_request_waits_for_one_that_is_being_recorded(
    service_on: OpenService, tiny_model: Path
) -> None:
    """The cells of a request that has ended are free only when it is recorded."""
    first, second = np.random.default_rng(2).integers(300, 448, (2, 300)).astype(np.int32)
    async with service_on(tiny_model, live_tokens=512, ctx_size=448) as service:
        ended = service.engine.generate(GenerateRequest(ids=first, n_predict=1))
        async for _ in ended:
            pass
        asking = asyncio.create_task(ask(service, second, 40))
        await until_async(lambda: asking.done() or service.engine.stats()["waiting"] == 1)
        ended.release()
        assert len((await asking).ids) == 40


async def test_a_reply_that_fills_the_context_waits_for_a_turn_that_is_being_recorded(
    service_on: OpenService, tiny_model: Path
) -> None:
    """It gives way to the turn and runs again; neither it nor a later request fails."""
    first, second = np.random.default_rng(3).integers(300, 448, (2, 200)).astype(np.int32)
    async with service_on(tiny_model, live_tokens=512, ctx_size=448) as service:
        ended = service.engine.generate(GenerateRequest(ids=first, n_predict=1))
        async for _ in ended:
            pass
        asking = asyncio.create_task(ask(service, second, 200))
        await until_async(lambda: asking.done() or service.engine.stats()["preemptions"] == 1)
        ended.release()
        assert len((await asking).ids) == 200
        assert len((await ask(service, first, 3)).ids) == 3
