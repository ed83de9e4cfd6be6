"""/towerd/v1/workflows: workflows of several agents."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from towerd.api.http.access import visible_scope
from towerd.api.http.fields import integer_query
from towerd.api.http.hints import checked_name
from towerd.api.http.keys import LIMITS, TENANT, service_of
from towerd.api.http.reply import json_reply
from towerd.sessions.workflows import Workflow


async def list_workflows(request: web.Request) -> web.Response:
    """The running workflows, most recently used first."""
    traffic = service_of(request).traffic
    limit = integer_query(request, "limit", 100, 1, request.app[LIMITS].page_max)
    found = await asyncio.to_thread(traffic.running, visible_scope(request))
    return json_reply({"workflows": [_json(each) for each in found[:limit]], "total": len(found)})


async def post_end(request: web.Request) -> web.Response:
    """End the caller's workflow: what only it used may be evicted first."""
    traffic = service_of(request).traffic
    id = checked_name(request.match_info["id"], "the workflow's id")
    ended = await asyncio.to_thread(traffic.end, request[TENANT].scope, id)
    return json_reply({"ended": _json(ended)})


def _json(workflow: Workflow) -> dict[str, Any]:
    return {
        "id": workflow.id,
        "scope": workflow.scope,
        "named": workflow.named,
        "started": workflow.started_s,
        "last_step": workflow.last_s,
        "steps": workflow.n_steps,
        "agents": list(workflow.agents),
        "sessions": list(workflow.towers),
    }
