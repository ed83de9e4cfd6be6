"""Keys of the application and of requests, and what handlers use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.http.gate import ApiService, ServiceGate
from towerd.api.http.limits import Limits
from towerd.api.http.metrics import Metrics, RequestMetrics
from towerd.api.http.tenants import Tenant, Tenants
from towerd.settings.config import Config

if TYPE_CHECKING:
    from towerd.api.http.kept_stream import KeptStreams
    from towerd.store.sessions.responses import ResponseTable
    from towerd.transfer import Transfer


CONFIG = web.AppKey("config", Config)
GATE = web.AppKey("gate", ServiceGate)
LIMITS = web.AppKey("limits", Limits)
METRICS = web.AppKey("metrics", Metrics)
REQUESTS = web.AppKey("requests", RequestMetrics)
"""The same metrics where there is a model; those of requests alone in a router."""
TENANTS = web.AppKey("tenants", Tenants)
UI: web.AppKey[Mapping[str, Path]] = web.AppKey("ui")
"""The files of llama.cpp's web UI by their paths below `/`; none where it is not served."""
UI_SETTINGS: web.AppKey[Mapping[str, Any]] = web.AppKey("ui_settings")
"""What --ui-config sets in it."""
STREAMS: web.AppKey[KeptStreams] = web.AppKey("streams")
TRANSFER: web.AppKey[Transfer] = web.AppKey("transfer")
LISTENING: web.AppKey[list[str]] = web.AppKey("listening")
"""The addresses of a process that listens on TCP."""
RESPONSES: web.AppKey[ResponseTable] = web.AppKey("responses")
"""Where no model is loaded: in a router, which has the catalog open."""
TENANT = web.RequestKey("tenant", Tenant)


def service_of(request: web.Request) -> ApiService:
    """The loaded service; see `ServiceGate.open`."""
    return request.app[GATE].open()


def responses_of(request: web.Request) -> ResponseTable:
    """The responses that are kept. Raises as `service_of`."""
    if RESPONSES in request.app:
        return request.app[RESPONSES]
    return service_of(request).store.responses
