"""Closing a service: whatever cancels it meanwhile, nothing is freed that a thread still uses."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.models.bundled import bundled_model


async def test_cancelled_again_while_it_closes(service_on: OpenService) -> None:
    """In the midst of a calibration, whose step on the inference thread uses the model."""
    opened: list[EmbeddedService] = []

    async def live() -> None:
        async with service_on(bundled_model(), threads=1) as service:
            service.engine.calibrator.request(again=False)
            opened.append(service)
            await asyncio.Event().wait()

    task = asyncio.create_task(live())
    await until_async(lambda: bool(opened))
    view = opened[0].engine.calibrator.view
    await until_async(lambda: view()["progress"]["done"] > 0)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.001)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"towerd-inference", "towerd-calibrate"}
    async with service_on(bundled_model(), threads=1) as again:  # its lock is free, too
        assert again.store.state is not None
