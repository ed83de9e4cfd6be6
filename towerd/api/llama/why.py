"""Looks, once a reply has ended, for what kept more of its prompt from being found; tells a client once
whose prompts always diverge at one place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from towerd.api.http.hints import AGENT_HEADER
from towerd.api.http.keys import TENANT, service_of
from towerd.api.http.request_log import log_habit
from towerd.api.llama.task import Task
from towerd.engine.base import Reuse
from towerd.sessions.divergence_finder import is_due
from towerd.sessions.habits import Habits

if TYPE_CHECKING:
    from towerd.sessions.divergence import Divergence

HABITS: web.AppKey[Habits] = web.AppKey("habits", Habits)


def find_divergence(
    request: web.Request, task: Task, then: Callable[[Divergence | None], None]
) -> None:
    """Call `then` with what the first prompt of a task diverged from: at once where nothing is to be found,
    else when it is known."""
    reuse = task.choices[0].reuse
    if not is_due(reuse):
        if reuse.live + reuse.hot + reuse.warm > reuse.prefill:
            _note(request, None)
        then(None)
        return

    def told(done: asyncio.Task[Divergence | None]) -> None:
        then(None if done.cancelled() else done.result())

    asyncio.create_task(_find(request, task, reuse)).add_done_callback(told)


async def _find(request: web.Request, task: Task, reuse: Reuse) -> Divergence | None:
    finder = service_of(request).divergences
    found = await finder.find(task.first_prompt, task.scope, reuse, task.session)
    if found is not None and _note(request, found):
        log_habit(request, found)
    return found


def _note(request: web.Request, found: Divergence | None) -> bool:
    """Note where a prompt diverged that has a predecessor; whether its client is to be told."""
    headers = request.headers
    client = request[TENANT].scope, headers.get(AGENT_HEADER), headers.get("User-Agent")
    return request.app[HABITS].note(client, None if found is None else found.place)
