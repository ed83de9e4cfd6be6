"""POST /v1/chat/completions/control: end the reasoning of a reply while it is generated."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.body import read_object
from towerd.api.http.keys import TENANT
from towerd.api.http.reply import json_reply
from towerd.api.llama.task import RUNNING
from towerd.errors import InvalidRequest
from towerd.store.tree.scope import tenant_of


async def post_control(request: web.Request) -> web.Response:
    """Takes the `id` of a running completion, and `action`: reasoning_end."""
    body = await read_object(request)
    name, action = fields.string(body, "id", ""), fields.string(body, "action", "")
    if not name:
        raise InvalidRequest("missing completion id")
    if action != "reasoning_end":
        raise InvalidRequest("unknown control action")
    task = request.app[RUNNING].get(name)
    if task is None or tenant_of(task.template.scope) != request[TENANT].scope:
        return _refused("no active completion for this id")
    if not await task.end_reasoning():
        return _refused("reasoning control not enabled for this completion")
    return json_reply({"success": True})


def _refused(why: str) -> web.Response:
    return json_reply({"success": False, "message": why})
