"""The running service in front of a llama-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from towerd.cold import Coding, Keeper, source_of
from towerd.config import Config
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.opening import open_llama_server
from towerd.session import Sessions
from towerd.store import Node, Store
from towerd.tiers.manager import Tiers
from towerd.traffic import Traffic, open_traffic


@dataclass(frozen=True, slots=True)
class SidecarService:
    """What the API serves from; see `towerd.service.Service`."""

    config: Config
    engine: LlamaServerEngine
    sessions: Sessions
    store: Store
    tiers: Tiers
    traffic: Traffic
    cold: Keeper


@asynccontextmanager
async def open_sidecar(config: Config) -> AsyncIterator[SidecarService]:
    """Start llama-server or attach to one, open the store; undo it all at the end.

    On the way out running requests are cancelled and recorded, slots are saved and their new
    rows written, and a llama-server that was started is stopped. Raises ModelError, StoreError,
    ConfigError."""
    async with open_llama_server(config) as (engine, store, tiers):
        traffic = await asyncio.to_thread(open_traffic, config, store, tiers)
        sessions = Sessions(engine, store, traffic)
        engine.traffic = traffic
        cold = sessions.cold = _open_keeper(config, engine, store)
        try:
            cold.start()  # llama-server has no requests that give way: none are made ahead
            yield SidecarService(config, engine, sessions, store, tiers, traffic, cold)
        finally:
            await cold.close()
            await sessions.drain()
            await asyncio.to_thread(traffic.close)


def _open_keeper(config: Config, engine: LlamaServerEngine, store: Store) -> Keeper:
    """The cold tier; slots do not bring back what it let go of."""
    loop = asyncio.get_running_loop()

    def forget(nodes: Sequence[Node]) -> None:
        gone = {node.id for node in nodes}
        # A slot that holds what is below holds these, too.
        tops = [node for node in nodes if node.parent is None or node.parent.id not in gone]
        with store.still():
            prefixes = {(node.scope, node.prefix_bytes()) for node in tops}
        loop.call_soon_threadsafe(engine.frozen, prefixes)

    coding = Coding(lambda: source_of(engine.info), tables=store.tables)
    return Keeper(store, coding, freeze_after_s=config.freeze_after_s, on_frozen=forget)
