"""Opening the llama-server engine with its store and tiers, and closing all of it in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from towerd.engine.base import OpenedEngine
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.process.backend import LlamaServerBackend, open_backend
from towerd.engine.llama_server.process.description import ModelDescription, describe, first_model
from towerd.errors import ConfigError, StoreError
from towerd.model.tokenizer_rules import check_tokenizer, keep_vocabulary, tokenizer_rules
from towerd.settings.config import Config, pinned_bytes
from towerd.settings.lowered import warn_of_lowered
from towerd.store import Catalog, Node, Store
from towerd.store.catalog.identity import ModelIdentity
from towerd.store.segments.mapped import MAPPED
from towerd.system.ram_limit import RamLimit
from towerd.system.uninterrupted import uninterrupted
from towerd.tiers.checkpoint_tier import CheckpointTier, close_tiers, open_checkpoint_tier
from towerd.tiers.formats.fidelity import Fidelity, LevelFormats
from towerd.tiers.formats.packaged import nearest_calibration
from towerd.tiers.formats.transform import load_transform
from towerd.tiers.manager import Tiers
from towerd.tiers.moved_limits import load_moved_limits

log = logging.getLogger(__name__)

ROOM_MIN = 64 << 20
"""Bytes beside a llama-server without which nothing can be answered."""
ROOM_SHARE = 0.7
"""Of what a llama-server has left when it was started; it takes the rest for its first batches."""


@asynccontextmanager
async def open_llama_server(
    config: Config, ram: RamLimit | None = None
) -> AsyncIterator[OpenedEngine[LlamaServerEngine]]:
    """Start or attach, probe, open the store for what was found; undo it all at the end. ram: what it keeps to
    with a llama-server that it starts.

    At the end, rows that only slots hold are saved and written. Raises ConfigError, ModelError,
    StoreError."""
    async with AsyncExitStack() as stack:
        backend, described, store = await _open_store(config, stack)
        if ram is not None and ram.is_limited:
            said, config = config, _within(config, ram)
            warn_of_lowered(said, config, ram.text)
            stack.callback(ram.take_back)
        tiers = await asyncio.to_thread(_open_tiers, config, backend, store, ram)
        checkpoint_tier = await asyncio.to_thread(_open_checkpoint_tier, config, backend, store)
        try:
            await asyncio.to_thread(_use_measured, tiers, store)
            engine = LlamaServerEngine(backend, described, store, tiers, config, checkpoint_tier)
            if not engine.why_not_movable:
                tiers.moved_limits = await asyncio.to_thread(load_moved_limits, store)
                await asyncio.to_thread(store.index_runs)
            for note in engine.notes:
                log.warning(note)
            gives = MAPPED.give_back, tiers.giver.ask
            for give in gives:
                tiers.ram.gives_way(give)
            try:
                forget = _forgetter(engine, store, checkpoint_tier)
                yield OpenedEngine(engine, store, tiers, forget, checkpoint_tier)
            finally:
                for give in gives:
                    tiers.ram.keeps(give)
                await uninterrupted(engine.close())
        finally:
            await uninterrupted(asyncio.to_thread(close_tiers, tiers, checkpoint_tier))


def _within(config: Config, ram: RamLimit) -> Config:
    """The settings with the caches that there is RAM for beside a llama-server, whose own sizes its flags say. Raises
    ConfigError if it leaves too little."""
    left = ram.left_at_start()
    if left < ROOM_MIN:
        raise ConfigError(
            f"{ram.text} is too little: llama-server has taken {ram.taken() >> 20} MiB with towerd. Raise it by "
            f"{(ROOM_MIN - left) >> 20} MiB, or lower --ctx-size."
        )
    room = max(ROOM_MIN, int(ROOM_SHARE * left))
    ram.leave_room(room, lambda: 0)
    return replace(config, hot_bytes=min(config.hot_bytes, room // 4))


def _use_measured(tiers: Tiers, store: Store) -> None:
    """Take the formats that were measured for the same weights, if any were."""
    try:
        measured = nearest_calibration(store)
        learned = load_transform(store, store.state.digest.hex())
    except StoreError as error:
        log.warning("measured formats cannot be read", extra={"reason": error.message})
        return
    if measured is not None:
        tiers.use(measured)
    if measured is not None and learned is not None:
        tiers.set_transform(learned.choices.get(tiers.fidelity))


def _open_checkpoint_tier(
    config: Config, backend: LlamaServerBackend, store: Store
) -> CheckpointTier | None:
    found = backend.probe
    if found.spec is None or not found.can_compose:
        return None
    exact = config.fidelity == "exact"
    kind, bytes_max = found.spec.kind, config.checkpoint_bytes
    return open_checkpoint_tier(store, kind, bytes_max=bytes_max, exact=exact)


def _forgetter(
    engine: LlamaServerEngine, store: Store, checkpoint_tier: CheckpointTier | None
) -> Callable[[Sequence[Node]], None]:
    """Keeps slots from bringing back segments that were dropped, and drops their state checkpoints."""
    loop = asyncio.get_running_loop()

    def forget(nodes: Sequence[Node]) -> None:
        if checkpoint_tier is not None:
            checkpoint_tier.forget(nodes)
        gone = {node.id for node in nodes}
        # A slot that holds what is below holds these, too.
        tops = [node for node in nodes if node.parent is None or node.parent.id not in gone]
        with store.locked():
            prefixes = {(node.scope, node.prefix_bytes()) for node in tops}
        loop.call_soon_threadsafe(engine.holds.frozen, prefixes)

    return forget


async def _open_store(
    config: Config, stack: AsyncExitStack
) -> tuple[LlamaServerBackend, ModelDescription, Store]:
    """Lock the store first, so that a second daemon fails before it starts a llama-server."""
    loop = asyncio.get_running_loop()
    found: list[tuple[LlamaServerBackend, ModelDescription]] = []

    async def find(catalog: Catalog) -> ModelIdentity:
        backend = await stack.enter_async_context(open_backend(config))
        meta = first_model(await backend.upstream.get("/v1/models"))
        described = await asyncio.to_thread(
            describe, config, backend.probe, backend.model, backend.command, meta, catalog
        )
        stack.callback(described.close)
        found.append((backend, described))
        known, path = described.info.row_identity, described.model.path
        rules = await asyncio.to_thread(tokenizer_rules, path, known.model_hash, catalog)
        return ModelIdentity(known, rules)

    def identity(catalog: Catalog) -> ModelIdentity:
        return asyncio.run_coroutine_threadsafe(find(catalog), loop).result()

    opening = partial(Store.open, catalog_fd=config.catalog_fd, encrypt=config.encrypt)
    store = await asyncio.to_thread(opening, config.store_dir, identity)
    store.writes.budget = config.write_budget
    store.disk.bytes_max = config.disk_max
    backend, described = found[0]
    stack.push_async_callback(asyncio.to_thread, store.close)
    if store.vault is not None and not backend.slotdir.in_ram:
        raise ConfigError(
            "The store is encrypted, and slot states would go through the disk as they are: give "
            "llama-server's --slot-save-path, or --slot-dir, a folder on a RAM disk."
        )
    vocab = described.vocab
    await asyncio.to_thread(keep_vocabulary, store, vocab.pieces, vocab.ptr)
    tokenize = partial(vocab.tokenize, add_special=False, parse_special=False)
    await asyncio.to_thread(check_tokenizer, store, tokenize)
    return backend, described, store


def _open_tiers(
    config: Config, backend: LlamaServerBackend, store: Store, ram: RamLimit | None
) -> Tiers:
    spec, ram = backend.probe.spec, ram or RamLimit(address_max=0)
    return Tiers(
        store,
        store.state.row_identity.layout,
        v_trans=spec is not None and spec.v_trans,
        hot_bytes=config.hot_bytes,
        pinned_bytes=min(pinned_bytes(config), ram.room // 4),
        ram=ram,
        warm_bytes=config.warm_bytes,
        policy=config.policy,
        predictor=config.predictor,
        fidelity=cast(Fidelity, config.fidelity),
        forced=LevelFormats.parse(config.level_formats) if config.level_formats else None,
        shrink_after_s=config.shrink_after_s,
        transform_after_s=config.transform_after_s,
    )
