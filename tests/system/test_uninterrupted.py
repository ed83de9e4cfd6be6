"""What must end before its surroundings are closed runs to its end, also if the caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from towerd.system.uninterrupted import uninterrupted


async def test_it_ends_before_the_cancellation_arrives() -> None:
    may_end, ended = asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        await may_end.wait()
        ended = True

    task = asyncio.create_task(uninterrupted(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_its_result_and_its_error_are_the_callers() -> None:
    async def fail() -> None:
        raise ValueError("for a test")

    assert await uninterrupted(asyncio.sleep(0, 3)) == 3
    with pytest.raises(ValueError, match="for a test"):
        await uninterrupted(fail())
