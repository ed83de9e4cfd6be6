"""Keys of the application and of requests, and the protocols of what handlers use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from towerd.api.http.limits import Limits
from towerd.api.http.metrics import Metrics, RequestMetrics
from towerd.api.http.tenants import Tenant, Tenants
from towerd.engine.base import Engine, Event, GenerateRequest
from towerd.errors import Unavailable
from towerd.settings.config import Config

if TYPE_CHECKING:
    from towerd.api.http.kept_stream import KeptStreams
    from towerd.cold import ColdTier
    from towerd.search.search import Search
    from towerd.sessions.recorder import TurnRecorder
    from towerd.sessions.traffic import Traffic
    from towerd.store import Store
    from towerd.tiers.formats.fidelity import Fidelity
    from towerd.tiers.ranking import Ranking
    from towerd.transfer import Transfer


class HasStats(Protocol):
    """An object with counters and gauges."""

    def stats(self) -> dict[str, Any]: ...


class SessionRunner(HasStats, Protocol):
    """`towerd.sessions.sessions.Sessions` as the API sees it."""

    @property
    def recorder(self) -> TurnRecorder:
        """Records turns that did not go through `run`."""
        ...

    def run(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Run one request; the Finish event arrives when its tokens are durable."""
        ...


class TiersView(HasStats, Protocol):
    """`towerd.tiers.manager.Tiers` as the API sees it."""

    ranking: Ranking
    """Ranks segments for eviction."""
    fidelity: Fidelity
    """The fidelity in force."""


class ApiService(Protocol):
    """Everything behind the API, from `towerd.service.open_service`."""

    @property
    def engine(self) -> Engine: ...
    @property
    def sessions(self) -> SessionRunner: ...
    @property
    def store(self) -> Store: ...
    @property
    def tiers(self) -> TiersView: ...
    @property
    def traffic(self) -> Traffic: ...
    @property
    def cold(self) -> ColdTier: ...
    @property
    def search(self) -> Search: ...


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
