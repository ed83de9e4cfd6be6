"""ServiceGate: the service behind the API, which is there, not yet, asleep, or not any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from towerd.api.http.keep_alive import KeepAlive
from towerd.engine.base import Engine, ModelInfo
from towerd.errors import TowerdError, Unavailable

if TYPE_CHECKING:
    from towerd.cold import ColdTier
    from towerd.roaming.roaming import Roaming
    from towerd.search.search import Search
    from towerd.sessions.divergence_finder import DivergenceFinder
    from towerd.sessions.sessions import Sessions
    from towerd.sessions.traffic import Traffic
    from towerd.store import Store
    from towerd.tiers.manager import Tiers

LOADING = "Loading model"
LEAVING = "The server is shutting down"


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
    @property
    def roaming(self) -> Roaming | None: ...


@dataclass(slots=True)
class Asleep:
    """What is answered without waking the model: as it was when it was unloaded."""

    props: Mapping[str, Any]
    models: Mapping[str, Any]
    stats: dict[str, dict[str, Any]]
    """See `towerd.api.llama.info.all_stats`."""
    own_stats: Mapping[str, Any]
    """The answer of GET /towerd/v1/stats."""
    info: ModelInfo
    n_ctx: int
    metrics: bytes = b""
    """The metrics of a llama-server."""


class ServiceGate:
    """The loaded service, who uses it, and whether it sleeps or shuts down. Event loop only."""

    def __init__(self, service: ApiService | None = None) -> None:
        self.service = service
        """None: it is loading, or asleep."""
        self.closing = False
        self.asleep: Asleep | None = None
        self.is_wanted = asyncio.Event()
        """Set while a request waits for a model that sleeps."""
        self._keep_alive = KeepAlive()
        self.has_new_rest = asyncio.Event()
        """Set when something else than time has changed when the model may fall asleep."""
        self._n_uses = self._n_reads = 0
        self._last_use_s = time.monotonic()
        self._waking: asyncio.Future[None] | None = None

    def open(self) -> ApiService:
        """The service. Raises Unavailable while the model loads and during shutdown."""
        self.check()
        if self.service is None:
            raise Unavailable(LOADING)
        return self.service

    def check(self) -> None:
        """Raises Unavailable while the model loads for the first time, and during shutdown."""
        if self.closing:
            raise Unavailable(LEAVING)
        if self.service is None and self.asleep is None:
            raise Unavailable(LOADING)

    @asynccontextmanager
    async def used(self) -> AsyncIterator[int]:
        """The model is loaded, and stays so, until the context ends. Gives the use's number, for `keep_alive`.
        Waits for one that sleeps; raises TowerdError if it cannot be loaded again."""
        self._n_uses += 1
        number = self._keep_alive.begin()
        try:
            if self.asleep is not None:
                await self._wake()
            yield number
        finally:
            self._n_uses -= 1
            self._last_use_s = time.monotonic()
            if self.keep_alive_s is not None and not self._n_uses:
                self.has_new_rest.set()

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds for which the model is to stay loaded behind its last use; None: the daemon's own."""
        return self._keep_alive.seconds

    def keep_alive(self, number: int, seconds: float | None) -> None:
        """Unload the model so long after its last use, unless one that began later than that of this number says
        something else. None: after the daemon's own time."""
        if self._keep_alive.say(number, seconds):
            self.has_new_rest.set()

    @contextmanager
    def read(self) -> Iterator[None]:
        """The model does not fall asleep until the context ends. That is no use: it may have to at once."""
        self._n_reads += 1
        try:
            yield
        finally:
            self._n_reads -= 1

    @property
    def is_read(self) -> bool:
        """Whether something is read of the service at this moment."""
        return self._n_reads > 0

    @property
    def is_used(self) -> bool:
        """Whether a request uses the model."""
        return self._n_uses > 0

    def idle_s(self) -> float:
        """Seconds since the last use; 0 while there is one."""
        return 0.0 if self._n_uses else time.monotonic() - self._last_use_s

    async def _wake(self) -> None:
        if self._waking is None:
            self._waking = asyncio.get_running_loop().create_future()
        self.is_wanted.set()
        waking = self._waking
        await asyncio.wait((waking,))
        if (error := waking.exception()) is not None:
            assert isinstance(error, TowerdError)
            raise type(error)(error.message, public=error.public)

    def fall_asleep(self, asleep: Asleep) -> ApiService:
        """Take the service, which no request uses, away; it is the caller's to close."""
        assert self.service is not None
        service, self.service, self.asleep = self.service, None, asleep
        self._keep_alive.forget()
        self.is_wanted.clear()
        return service

    def woken(self, service: ApiService) -> None:
        """The model is loaded again. The time that it took does not count as idle."""
        self.service, self.asleep = service, None
        self._last_use_s = time.monotonic()
        self._end_waiting(None)

    def not_woken(self, error: TowerdError) -> None:
        """The model could not be loaded again: requests that wait for it get `error`, and the next one
        tries again."""
        self.is_wanted.clear()
        self._end_waiting(error)

    def _end_waiting(self, error: TowerdError | None) -> None:
        waking, self._waking = self._waking, None
        if waking is None:
            return
        if error is None:
            waking.set_result(None)
        else:
            waking.set_exception(error)
            waking.exception()  # those who waited may have left
