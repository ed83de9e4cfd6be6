"""Which processes a router consists of, and what each is for."""

from __future__ import annotations

import os
from typing import Any

from aiohttp import web

from towerd.api.admin.overview import require_overview
from towerd.api.http.reply import json_reply
from towerd.router.http.keys import LAUNCHER, MODELS
from towerd.router.loading.model import RoutedModel


async def get_processes(request: web.Request) -> web.Response:
    """The router, which is the broker of the store's catalog, the processes of models, and the one in
    reserve."""
    require_overview(request)
    models = request.app[MODELS].by_name.values()
    spare = request.app[LAUNCHER].spare_pid
    return json_reply(
        {
            "processes": [
                {"pid": os.getpid(), "role": "router", "is_broker": True},
                *(_of(each) for each in models if each.process is not None),
                *([{"pid": spare, "role": "reserve", "is_broker": False}] if spare else []),
            ]
        }
    )


def _of(model: RoutedModel) -> dict[str, Any]:
    assert model.process is not None
    return {
        "pid": model.process.pid_if_started,
        "role": "model",
        "is_broker": False,
        "model": model.name,
        "state": model.state.value,
        "silent": model.silent or None,
    }
