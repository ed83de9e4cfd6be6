"""The running service: engine, tiers, store and sessions, opened and closed in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from towerd.anticipate import Anticipator
from towerd.cold import Coding, Keeper, source_of
from towerd.config import Config
from towerd.engine.base import LiveBudget
from towerd.engine.embedded.calibrate import Calibrator
from towerd.engine.embedded.core import Core, load_core
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.engine.weights_check import WeightsCheck
from towerd.session import Sessions
from towerd.slots.fingerprint import Fingerprint
from towerd.store import Catalog, Node, Store
from towerd.store.boundaries import ANYWHERE, CUT_META
from towerd.tiers.boundary import BoundaryTier
from towerd.tiers.fidelity import Fidelity, LevelFormats
from towerd.tiers.manager import Tiers
from towerd.traffic import Traffic, open_traffic


@dataclass(frozen=True, slots=True)
class Service:
    """What the API serves from."""

    config: Config
    engine: EmbeddedEngine
    sessions: Sessions
    store: Store
    tiers: Tiers
    traffic: Traffic
    boundaries: BoundaryTier | None
    """Of models whose memory cannot be cut at any token."""
    calibrator: Calibrator
    cold: Keeper


@asynccontextmanager
async def open_service(config: Config) -> AsyncIterator[Service]:
    """Load the model, open the store, start the inference thread; undo it all at the end.

    On the way out running requests are cancelled and recorded, live rows are exported and
    written, and the catalog is closed. Raises ModelError, StoreError, ConfigError."""
    core, store = await asyncio.to_thread(_open_store, config)
    try:
        boundaries = await asyncio.to_thread(_open_boundaries, config, core, store)
        tiers = await asyncio.to_thread(_open_tiers, config, core, store)
        try:
            traffic = await asyncio.to_thread(open_traffic, config, store, tiers)
            engine = EmbeddedEngine(core, tiers, config, boundaries)
            engine.start()
            tiers.prefetcher.is_calm = engine.is_calm
            sessions = Sessions(engine, store, traffic)
            if config.anticipate and core.can_slice:
                traffic.anticipator = sessions.anticipator = Anticipator(
                    engine, sessions.run_quietly, tokens_max=config.anticipate_tokens_max
                )
            calibrator = Calibrator(
                core,
                engine.scheduler,
                store,
                tiers,
                fidelity=config.fidelity,
                forced=config.level_formats is not None,
            )
            cold = sessions.cold = _open_keeper(config, engine, store, boundaries)
            weights = _weights_check(core, engine, store, boundaries)
            try:
                await asyncio.to_thread(calibrator.start)
                weights.start()
                live = LiveBudget(config.retention, config.live_budget or engine.n_ctx // 2)
                cold.start(sessions.run_quietly, engine.n_ctx, live)
                if cold.ahead is not None:
                    tiers.prefetcher.on_cold = cold.ahead.foretold
                yield Service(
                    config, engine, sessions, store, tiers, traffic, boundaries, calibrator, cold
                )
            finally:
                tiers.prefetcher.on_cold = None
                if sessions.anticipator is not None:
                    await sessions.anticipator.close()
                await cold.close()
                await sessions.drain()
                await asyncio.to_thread(weights.close)
                await asyncio.to_thread(calibrator.close)
                await engine.close()
                await asyncio.to_thread(traffic.close)
        finally:
            if boundaries is not None:
                await asyncio.to_thread(boundaries.close)
            await asyncio.to_thread(tiers.close)
    finally:
        await asyncio.to_thread(store.close)
        await asyncio.to_thread(core.close)


def _open_store(config: Config) -> tuple[Core, Store]:
    """Lock the store first, so that a second daemon fails before it loads a model."""
    cores: list[Core] = []

    def load(catalog: Catalog) -> Fingerprint:
        cores.append(load_core(config, catalog))
        return cores[0].info.fingerprint

    try:
        store = Store.open(config.store_dir, load)
    except BaseException:
        for core in cores:
            core.close()
        raise
    return cores[0], store


def _open_tiers(config: Config, core: Core, store: Store) -> Tiers:
    return Tiers(
        store,
        core.layout,
        v_trans=core.context.v_trans,
        hot_bytes=config.hot_bytes,
        warm_bytes=config.warm_bytes,
        policy=config.policy,
        predictor=config.predictor,
        prefetch_bytes=config.prefetch_bytes,
        fidelity=cast(Fidelity, config.fidelity),
        forced=LevelFormats.parse(config.level_formats) if config.level_formats else None,
        shrink_after_s=config.shrink_after_s,
        tail=core.memory.tail,
    )


def _open_keeper(
    config: Config, engine: EmbeddedEngine, store: Store, boundaries: BoundaryTier | None
) -> Keeper:
    """The cold tier; boundary states of segments that go are deleted with them."""

    def forget(nodes: Sequence[Node]) -> None:
        if boundaries is not None:
            for node in nodes:
                boundaries.table.drop(node)

    coding = Coding(lambda: source_of(engine.info), tables=store.tables)
    return Keeper(store, coding, freeze_after_s=config.freeze_after_s, on_frozen=forget)


def _weights_check(
    core: Core, engine: EmbeddedEngine, store: Store, boundaries: BoundaryTier | None
) -> WeightsCheck:
    """What follows when the file under the loaded weights changes: rows are void."""

    def changed(since: float) -> None:
        store.rows.distrust(since)
        if boundaries is not None:
            boundaries.distrust(since)
        engine.forget_live()

    return WeightsCheck([core.model.file], store, is_busy=engine.is_busy, on_change=changed)


def _open_boundaries(config: Config, core: Core, store: Store) -> BoundaryTier | None:
    if not core.memory.kind.has_state:
        store.set_meta(CUT_META + store.state.digest.hex(), ANYWHERE)
        return None
    store.set_meta(CUT_META + store.state.digest.hex(), core.memory.kind.cut)
    exact = config.fidelity == "exact"
    return BoundaryTier(store, bytes_max=config.boundary_bytes, exact=exact)
