"""The admin API over a store alone, which towerctl uses while no daemon is running.

It knows which model was last served from the store, but no text: that needs the model's tokenizer
and therefore a running daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web

from towerd import __version__
from towerd.api.admin.pins import base_json
from towerd.api.http.body import BODIES, Bodies
from towerd.api.http.gate import ServiceGate
from towerd.api.http.keys import (
    CONFIG,
    GATE,
    LIMITS,
    METRICS,
    REQUESTS,
    TENANTS,
    TRANSFER,
    UI,
    service_of,
)
from towerd.api.http.limits import Limits
from towerd.api.http.metrics import Metrics
from towerd.api.http.middleware import MIDDLEWARES
from towerd.api.http.reply import json_reply
from towerd.api.http.tenants import Tenants
from towerd.app.store_routes import STORE_ROUTES, Route, add_routes
from towerd.cold import Coding, ColdTier, VocabularySource
from towerd.errors import StoreError, StoreLocked, TowerdError
from towerd.models.bundled import find_model
from towerd.search.search import Search, open_search
from towerd.settings.config import Config
from towerd.slots.row_identity import REPORTED_HASH_PREFIX
from towerd.store import Store, latest_row_identity
from towerd.tiers.formats.calibration import load_calibration
from towerd.tiers.formats.packaged import packaged_calibration
from towerd.transfer import Transfer

if TYPE_CHECKING:
    from towerd.engine.base import Engine
    from towerd.roaming.roaming import Roaming
    from towerd.sessions.divergence_finder import DivergenceFinder
    from towerd.sessions.sessions import Sessions
    from towerd.sessions.traffic import Traffic
    from towerd.tiers.manager import Tiers

DAEMON_ONLY = (
    "engine_name",
    "fidelity",
    "model",
    "model_path",
    "n_ctx",
    "n_slots",
    "is_sleeping",
    "space",
    "uptime_s",
    "reuse",
    "slots",
    "engine",
    "tiers",
    "cold",
    "traffic",
    "shared",
    "ram",
)
"""Keys of /towerd/v1/stats that only a daemon can fill."""


@dataclass(frozen=True, slots=True)
class StoreService:
    """`towerd.api.http.gate.ApiService` without a model. Access to anything that needs one raises
    TowerdError."""

    store: Store
    cold: ColdTier
    search: Search

    @property
    def engine(self) -> Engine:
        """Raises TowerdError."""
        raise TowerdError(
            "Text needs the model's tokenizer: start the daemon with towerd serve and ask again."
        )

    @property
    def sessions(self) -> Sessions:
        """Raises TowerdError."""
        _needs_daemon()

    @property
    def tiers(self) -> Tiers:
        """Raises TowerdError."""
        _needs_daemon()

    @property
    def traffic(self) -> Traffic:
        """Raises TowerdError."""
        _needs_daemon()

    @property
    def divergences(self) -> DivergenceFinder:
        """Raises TowerdError."""
        _needs_daemon()

    @property
    def roaming(self) -> Roaming | None:
        """Raises TowerdError."""
        _needs_daemon()


def _needs_daemon() -> NoReturn:
    raise TowerdError("Only the daemon knows this: start it with towerd serve and ask again.")


@asynccontextmanager
async def open_store_app(config: Config) -> AsyncIterator[web.Application]:
    """Open the store of `config`, which must exist, and close it at the end.

    Raises StoreError, StoreLocked, StoreVersion."""
    store = await asyncio.to_thread(_open_store, config.store_dir)
    coding = Coding(lambda: _source(config, store), tables=store.tables)
    cold = ColdTier(store, coding, freeze_after_s=-1)
    app = web.Application(middlewares=MIDDLEWARES)
    app[CONFIG] = config
    search = await asyncio.to_thread(open_search, store, coding, config.search)
    app[GATE] = ServiceGate(StoreService(store, cold, search))
    app[LIMITS] = Limits()
    app[BODIES] = Bodies(config.request_bytes_max)
    app[METRICS] = app[REQUESTS] = Metrics()
    app[TENANTS] = Tenants(())
    app[TRANSFER] = Transfer()
    app[UI] = {}
    add_routes(app, STORE_ROUTES + _STORE_ONLY_ROUTES)
    try:
        yield app
    finally:
        await asyncio.to_thread(app[TRANSFER].close)
        await cold.close()
        await asyncio.to_thread(search.close)
        await asyncio.to_thread(store.close)


def _open_store(root: Path) -> Store:
    if not any((root / name).exists() for name in ("catalog.sqlite", "journal", "segments")):
        raise StoreError(
            f"There is no store at {root}: run towerd serve, or name a store with --store-dir."
        )
    try:
        return Store.open(root, latest_row_identity)
    except StoreLocked as error:
        raise StoreLocked(
            f"{error.message}; ask a running daemon with --socket or --url"
        ) from error


def _source(config: Config, store: Store) -> VocabularySource:
    """The vocabulary of the model of `config`, which must be that of the model that was last served
    from the store. Raises ModelError, or StoreError if that model's tokens were not seen."""
    path = find_model(config.model, config.hf_repo, config.hf_file)
    served = store.state.row_identity
    if served.model_hash.startswith(REPORTED_HASH_PREFIX):
        raise StoreError(
            "Coding a text needs the vocabulary of the model that was served from this store, "
            "and its file could not be read there: start its daemon, or serve the model's own file."
        )
    return VocabularySource(path, served.model_hash, tokenizer=served.tokenizer)


async def get_stats(request: web.Request) -> web.Response:
    """The keys of the daemon's stats; values that only a daemon knows are null."""
    store = service_of(request).store
    footprint = await asyncio.to_thread(store.footprint)
    return json_reply(
        {
            "version": __version__,
            **dict.fromkeys(DAEMON_ONLY),
            "fingerprint": store.state.digest.hex(),
            "store": await asyncio.to_thread(store.stats),
            "footprint": footprint.to_json(),
            "written": store.writes.stats(),
        }
    )


async def list_bases(request: web.Request) -> web.Response:
    """The precached prompts of all tenants."""
    bases = await asyncio.to_thread(service_of(request).store.bases.listing)
    return json_reply({"bases": [base_json(base) for base in bases]})


async def get_calibration(request: web.Request) -> web.Response:
    """The stored calibration, if there is one."""
    store = service_of(request).store
    own = await asyncio.to_thread(load_calibration, store, store.state.digest.hex())
    found = own or packaged_calibration(store.state.row_identity)
    view = {
        "state": "done" if found is not None else "waiting",
        "why": "no daemon runs",
        "fidelity": None,
        "level_formats": None,
        "progress": {"done": 0, "total": 0},
        "calibration": found.to_json() if found is not None else None,
        "row_identity": store.state.row_identity.to_json(),
    }
    return json_reply({"calibration": view})


_STORE_ONLY_ROUTES = (
    Route("GET", "/towerd/v1/stats", get_stats),
    Route("GET", "/towerd/v1/bases", list_bases),
    Route("GET", "/towerd/v1/calibration", get_calibration),
)
"""Routes that replace the daemon's."""
