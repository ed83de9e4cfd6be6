"""/towerd/v1/shared: sessions and bases to the shared tier and from it. For the owner only."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.access import own_scope, require_admin
from towerd.api.http.body import read_object
from towerd.api.http.keys import service_of
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest, NotSupported

if TYPE_CHECKING:
    from towerd.roaming.roaming import Roaming


OLDER_THAN_DAYS_MIN = 2
"""What is in use is put again each day."""


async def get_shared(request: web.Request) -> web.Response:
    """What the tenant `?scope=`, or the caller, can pull."""
    scope = request.query.get("scope", "") or own_scope(request)
    return json_reply(await _roaming(request).listing(scope))


async def post_push(request: web.Request) -> web.Response:
    """Put a `session` (of the tenant `scope`, if several have it) or a `base`."""
    roaming, body = await _asked(request)
    scope = fields.string(body, "scope", "")
    if name := fields.string(body, "session", ""):
        return json_reply(await roaming.push_session(name, scope or None))
    name = fields.string(body, "base", "")
    return json_reply(await roaming.push_base(name, scope or own_scope(request)))


async def post_pull(request: web.Request) -> web.Response:
    """Take a `session` or a `base`, for the tenant `scope`, or the caller's; `replace`: a base of another text is
    replaced."""
    roaming, body = await _asked(request)
    scope = fields.string(body, "scope", "") or own_scope(request)
    if name := fields.string(body, "session", ""):
        found = await roaming.pull_session(name, scope)
        service_of(request).search.changed()
        return json_reply(found)
    name = fields.string(body, "base", "")
    replace = fields.boolean(body, "replace", False)
    return json_reply(await roaming.pull_base(name, scope, replace))


async def post_rm(request: web.Request) -> web.Response:
    """Delete a `session` or a `base` of the tenant `scope`, or the caller's, there."""
    roaming, body = await _asked(request)
    scope = fields.string(body, "scope", "") or own_scope(request)
    if name := fields.string(body, "session", ""):
        return json_reply(await roaming.remove_session(name, scope))
    return json_reply(await roaming.remove_base(fields.string(body, "base", ""), scope))


async def post_gc(request: web.Request) -> web.Response:
    """Delete what no record names any more; `older_than_days`: also what nobody put for so long; `dry_run`: only
    count."""
    roaming = _roaming(request)
    body = await read_object(request)
    dry_run = fields.boolean(body, "dry_run", False)
    days = body.get("older_than_days")
    older_than = None
    if days is not None:
        days = fields.number("older_than_days", days)
        fields.check_range("older_than_days", days, OLDER_THAN_DAYS_MIN, 36_500)
        older_than = timedelta(days=days)
    return json_reply(await roaming.collect(older_than, dry_run))


async def _asked(request: web.Request) -> tuple[Roaming, fields.Body]:
    """Raises Forbidden, NotSupported without a shared tier, InvalidRequest."""
    roaming = _roaming(request)
    body = await read_object(request)
    if bool(body.get("session")) == bool(body.get("base")):
        raise InvalidRequest("Exactly one of 'session' and 'base' is required")
    return roaming, body


def _roaming(request: web.Request) -> Roaming:
    """Raises Forbidden, NotSupported without a shared tier."""
    require_admin(request)
    roaming = service_of(request).roaming
    if roaming is None:
        raise NotSupported("This daemon has no shared tier: start it with --shared URL.")
    return roaming
