"""/towerd/v1/segments/{id}/why: why a segment is where it is, and when it would be evicted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.admin.overview import require_overview
from towerd.api.admin.segments import Viewer, segment_json, viewer_of
from towerd.api.http.keys import service_of
from towerd.api.http.query import segment_id
from towerd.api.http.reply import json_reply

if TYPE_CHECKING:
    from towerd.tiers.ranking import Ranking


async def get_why(request: web.Request) -> web.Response:
    """How the policies rank one segment: score, prediction, pin and place."""
    service = service_of(request)
    ranking: Ranking = service.tiers.ranking
    number, viewer = segment_id(request), await viewer_of(request)

    def why() -> dict[str, Any]:
        node = viewer.node(service.store, number)
        if not viewer.may_see_uses(node):
            require_overview(request)
        segment = segment_json(node, service.store, viewer)
        return {"segment": segment, "why": _shown(ranking.explain(node), viewer)}

    return json_reply(await asyncio.to_thread(why))


def _shown(why: dict[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Without what counts the segments of all tenants, unless the caller sees what all do."""
    if viewer.sees_all:
        return why
    for tier in ("hot", "warm"):
        if why[tier] is not None:
            why[tier] = {**why[tier], "place": None}
    return {**why, "n_hot": None, "n_warm": None}
