"""Runs the choices of one response concurrently and merges their events as they occur."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from towerd.api.llama.task import Task
from towerd.engine.base import Event

if TYPE_CHECKING:  # slow to import, and not needed before a model is loaded
    from towerd.sessions.sessions import Sessions

Item = tuple[int, Event] | Exception | None


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
    sessions: Sessions, task: Task, *, parallel: int, events_max: int
) -> AsyncIterator[Events]:
    """Run the choices of a task, at most `parallel` at once. Leaving the context cancels those that
    still run and waits until every iterator is closed."""
    events = Events(events_max)
    waiting = iter(range(len(task.choices)))
    n_workers = min(max(parallel, 1), len(task.choices))

    async def drive() -> None:
        workers = [
            asyncio.create_task(_run(sessions, task, waiting, events)) for _ in range(n_workers)
        ]
        try:
            await asyncio.gather(*workers)
            await events.queue.put(None)
        except Exception as error:
            await events.queue.put(error)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    driver = asyncio.create_task(drive())
    try:
        yield events
    finally:
        driver.cancel()
        await asyncio.gather(driver, return_exceptions=True)


async def _run(sessions: Sessions, task: Task, waiting: Iterator[int], events: Events) -> None:
    """Run waiting choices, one after the other."""
    since = None if task.began is None else task.began[1]
    for index in waiting:
        request = await task.request_of(index)
        async with aclosing(sessions.run(request, since, task.new_turn(index))) as running:
            async for event in running:
                await events.queue.put((index, event))
