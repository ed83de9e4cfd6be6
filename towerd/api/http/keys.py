"""Keys of the application and of requests, and what handlers use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from towerd.api.http.limits import Limits
from towerd.api.http.metrics import Metrics, RequestMetrics
from towerd.api.http.tenants import Tenant, Tenants
from towerd.engine.base import Engine
from towerd.errors import Unavailable
from towerd.settings.config import Config

if TYPE_CHECKING:
    from towerd.api.http.kept_stream import KeptStreams
    from towerd.cold import ColdTier
    from towerd.search.search import Search
    from towerd.sessions.divergence_finder import DivergenceFinder
    from towerd.sessions.sessions import Sessions
    from towerd.sessions.traffic import Traffic
    from towerd.store import Store
    from towerd.tiers.manager import Tiers
    from towerd.transfer import Transfer


class ApiService(Protocol):
    """Everything behind the API: `towerd.service.Service`, or of a store alone
    `towerd.app.store_app.StoreService`."""

    @property
    def engine(self) -> Engine: ...
    @property
    def sessions(self) -> Sessions: ...
    @property
    def store(self) -> Store: ...
    @property
    def tiers(self) -> Tiers: ...
    @property
    def traffic(self) -> Traffic: ...
    @property
    def cold(self) -> ColdTier: ...
    @property
    def search(self) -> Search: ...
    @property
    def divergences(self) -> DivergenceFinder: ...


@dataclass(slots=True)
class ServiceGate:
    """The application's only mutable state: the loaded service, and whether it is shutting down."""

    service: ApiService | None = None
    closing: bool = False

    def open(self) -> ApiService:
        """The service. Raises Unavailable while the model loads and during shutdown."""
        if self.closing:
            raise Unavailable("The server is shutting down")
        if self.service is None:
            raise Unavailable("Loading model")
        return self.service


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
TENANT = web.RequestKey("tenant", Tenant)


def service_of(request: web.Request) -> ApiService:
    """The loaded service; see `ServiceGate.open`."""
    return request.app[GATE].open()
