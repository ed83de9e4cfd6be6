"""The composition root: a service and everything in it is constructed here, for either engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from towerd.cold import Coding, ColdTier, IdleFreezer, check_codec_model, vocabulary_source
from towerd.engine.base import EngineT, LiveBudget, OpenedEngine
from towerd.errors import ConfigError
from towerd.policy.factory import load_predictor
from towerd.search.search import Search, open_search
from towerd.sessions.divergence_finder import DivergenceFinder
from towerd.sessions.recorder import TurnRecorder
from towerd.sessions.sessions import Sessions
from towerd.sessions.traffic import Traffic, open_traffic
from towerd.settings.config import Config
from towerd.store import Store
from towerd.store.maintenance.model_names import remember_name
from towerd.system.uninterrupted import uninterrupted
from towerd.tiers.manager import Tiers

if TYPE_CHECKING:
    from towerd.roaming.roaming import Roaming
    from towerd.tiers.shared.bucket import Bucket
    from towerd.tiers.shared.tier import SharedTier


@dataclass(frozen=True, slots=True)
class Service(Generic[EngineT]):
    """The open parts of the daemon, from which the API serves."""

    config: Config
    engine: EngineT
    sessions: Sessions
    store: Store
    tiers: Tiers
    traffic: Traffic
    cold: ColdTier
    search: Search
    divergences: DivergenceFinder
    roaming: Roaming | None
    """None without --shared."""


@asynccontextmanager
async def open_service(config: Config) -> AsyncIterator[Service[Any]]:
    """Open the engine that `config` names, its store, and everything built on them; close it all at
    the end.

    At the end, running requests are cancelled and recorded, new rows are written, and the catalog
    is closed. Raises ModelError, StoreError or ConfigError."""
    await asyncio.to_thread(check_own_models, config)
    bucket = await asyncio.to_thread(_bucket, config)
    async with await asyncio.to_thread(_opening, config) as opened:
        engine, store, tiers = opened.engine, opened.store, opened.tiers
        await asyncio.to_thread(remember_name, store.state, engine.info.alias)
        shared = await asyncio.to_thread(_shared_tier, config, bucket, opened)
        traffic = await asyncio.to_thread(open_traffic, config, store, tiers)
        cold = ColdTier(
            store,
            Coding(lambda: vocabulary_source(engine.info), store.tables, config.codec_model),
            freeze_after_s=config.freeze_after_s,
            on_frozen=opened.forget,
            has_checkpoint=None if opened.checkpoints is None else opened.checkpoints.has,
        )
        search = await asyncio.to_thread(open_search, store, cold.coding, config.search)
        roaming = _roaming(shared, tiers, cold)
        sessions = Sessions(
            engine,
            TurnRecorder(store, traffic, search),
            tiers if config.anticipate else None,
            cold,
            anticipate_tokens_max=opened.anticipate_tokens_max,
            fetcher=None if roaming is None else roaming.fetcher,
        )
        freezer = IdleFreezer(cold)
        divergences = DivergenceFinder(store, search.reader)
        parts = config, engine, sessions, store, tiers, traffic, cold, search, divergences
        service = Service(*parts, roaming)
        try:
            _start(config, opened, sessions, cold)
            freezer.start()
            search.start(cold.idle_s)
            if roaming is not None:
                roaming.start()
            yield service
        finally:
            await uninterrupted(_close(service, freezer))


async def _close(service: Service[Any], freezer: IdleFreezer) -> None:
    """End what was built on the engine, the store and the tiers."""
    roaming, sessions, cold = service.roaming, service.sessions, service.cold
    if roaming is not None:
        roaming.stop()
    service.tiers.prefetcher.stop()
    await sessions.stop_anticipating()
    await freezer.stop()
    await cold.stop()
    await sessions.drain()  # may wait for a thaw
    if roaming is not None:
        await roaming.close()
    await service.divergences.close()
    await asyncio.to_thread(service.traffic.close)
    await asyncio.to_thread(service.search.close)
    await cold.close()  # reading for the search used its vocabulary


def check_own_models(config: Config) -> None:
    """Try the models that towerd itself uses: to load the served one may take minutes. Raises
    ConfigError."""
    if config.codec_model is not None:
        check_codec_model(config.codec_model)
    if config.predictor is not None:
        load_predictor(config.policy, config.predictor)


def _opening(config: Config) -> AbstractAsyncContextManager[OpenedEngine[Any]]:
    """A context manager that opens the engine. Call this in a thread: the import is slow."""
    # Imported late: the embedded engine loads llama.cpp, which llama-server does not need.
    if config.engine == "llama-server":
        from towerd.engine.llama_server.opening import open_llama_server

        return open_llama_server(config)
    from towerd.engine.embedded.opening import open_embedded

    return open_embedded(config)


def _bucket(config: Config) -> Bucket | None:
    """The bucket of the shared tier; None without one. Raises ConfigError."""
    if config.shared is None:
        return None
    try:  # late: it takes packages that nothing else needs
        import towerd.roaming.roaming  # noqa: F401
        from towerd.tiers.shared.bucket import open_bucket
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--shared needs the package {error.name}: pip install 'towerd[shared]'."
        ) from error
    return open_bucket(config.shared)


def _shared_tier(
    config: Config, bucket: Bucket | None, opened: OpenedEngine[Any]
) -> SharedTier | None:
    """The shared tier of an open store; None without one. Raises ConfigError."""
    if bucket is None:
        return None
    from towerd.tiers.shared.sealing import master_key
    from towerd.tiers.shared.tier import SharedTier

    key = master_key(config.shared_key, config.store_dir, opened.store.vault)
    return SharedTier(
        opened.store,
        bucket,
        key,
        opened.tiers.fidelity,
        has_rows=bool(opened.tiers.layout.planes),
        checkpoints=opened.checkpoints,
    )


def _roaming(shared: SharedTier | None, tiers: Tiers, cold: ColdTier) -> Roaming | None:
    """What talks with the shared tier; None without one."""
    if shared is None:
        return None
    from towerd.roaming.roaming import Roaming

    return Roaming(shared, tiers, cold)


def _start(config: Config, opened: OpenedEngine[Any], sessions: Sessions, cold: ColdTier) -> None:
    """Start thawing ahead and prefetch; rows are encoded again between requests from now on."""
    if opened.is_quiet is None:
        cold.start()
        return
    opened.store.rows.encoding.is_quiet = opened.is_quiet
    n_ctx = opened.engine.n_ctx
    live = LiveBudget(config.retention, config.live_budget or n_ctx // 2, config.retention_scope)
    ahead = cold.start(sessions.run_quietly, n_ctx, live)
    opened.tiers.prefetcher.start(ahead.prefetch, opened.is_quiet, ahead.expected_back)
