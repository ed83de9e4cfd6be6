"""Runs the choices of one response concurrently and merges their events as they occur."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from towerd.api.http.keys import SessionRunner
from towerd.engine.base import Event, GenerateRequest

Item = tuple[int, Event] | Exception | None
MakeRequest = Callable[[], Awaitable[GenerateRequest]]


class Events:
    """The events of the running choices, from one bounded queue."""

    def __init__(self, events_max: int) -> None:
        self.queue: asyncio.Queue[Item] = asyncio.Queue(events_max)

    async def next(self, timeout_s: float | None = None) -> tuple[int, Event] | None:
        """The next (choice index, event); None when all have finished.

        Raises TimeoutError after `timeout_s` without an event, and any error of a choice."""
        if self.queue.empty():
            async with asyncio.timeout(timeout_s):
                item = await self.queue.get()
        else:
            item = self.queue.get_nowait()
        if isinstance(item, Exception):
            raise item
        return item


@asynccontextmanager
async def fan_out(
    runner: SessionRunner, requests: Sequence[MakeRequest], *, parallel: int, events_max: int
) -> AsyncIterator[Events]:
    """Make and run `requests`, at most `parallel` at once. Leaving the context cancels those that
    still run and waits until every iterator is closed."""
    events = Events(events_max)
    waiting = iter(enumerate(requests))
    n_tasks = min(max(parallel, 1), len(requests))

    async def drive() -> None:
        tasks = [asyncio.create_task(_run(runner, waiting, events)) for _ in range(n_tasks)]
        try:
            await asyncio.gather(*tasks)
            await events.queue.put(None)
        except Exception as error:
            await events.queue.put(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    driver = asyncio.create_task(drive())
    try:
        yield events
    finally:
        driver.cancel()
        await asyncio.gather(driver, return_exceptions=True)


async def _run(
    runner: SessionRunner, waiting: Iterator[tuple[int, MakeRequest]], events: Events
) -> None:
    """Run waiting requests, one after the other."""
    for index, make in waiting:
        iterator = runner.run(await make())
        try:
            async for event in iterator:
                await events.queue.put((index, event))
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()
