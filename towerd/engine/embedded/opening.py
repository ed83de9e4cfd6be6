"""Opening the embedded engine with its store and tiers, and closing all of it in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from towerd.engine.base import OpenedEngine
from towerd.engine.embedded.context.core import Core, load_core
from towerd.engine.embedded.context.ram_plan import check_started, within_room
from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.model.tokenizer_rules import check_tokenizer, keep_vocabulary, tokenizer_rules
from towerd.model.weights_check import WeightsCheck
from towerd.settings.config import Config, pinned_bytes
from towerd.settings.lowered import warn_of_lowered
from towerd.store import Catalog, Node, Store
from towerd.store.catalog.identity import ModelIdentity
from towerd.store.segments.mapped import MAPPED
from towerd.system.ram_limit import RamLimit
from towerd.system.uninterrupted import uninterrupted
from towerd.tiers.checkpoint_tier import CheckpointTier, close_tiers, open_checkpoint_tier
from towerd.tiers.formats.fidelity import Fidelity, LevelFormats
from towerd.tiers.manager import Tiers

_MAPPED_SHARE = 8
"""Of the RAM that is left beside the model, files that are read may take one in so many parts."""


@asynccontextmanager
async def open_embedded(
    config: Config, ram: RamLimit
) -> AsyncIterator[OpenedEngine[EmbeddedEngine]]:
    """Load the model, open the store, start the inference thread; undo it all at the end.

    ram: what all of it keeps to. At the end running requests are cancelled, live rows are exported and written, and the
    catalog is closed. Raises ModelError, StoreError, ConfigError."""
    core, store = await asyncio.to_thread(_open_store, config, ram)
    said = config
    if ram.is_limited:
        MAPPED.bytes_max = ram.room // _MAPPED_SHARE
        config = replace(within_room(config, ram.room), ubatch_size=core.context.n_ubatch)
    try:
        opening = partial(
            open_checkpoint_tier,
            bytes_max=config.checkpoint_bytes,
            exact=config.fidelity == "exact",
        )
        checkpoint_tier = await asyncio.to_thread(opening, store, core.memory.kind)
        tiers = await asyncio.to_thread(_open_tiers, config, core, store)
        try:
            engine = EmbeddedEngine(core, tiers, config, checkpoint_tier)
            weights = _weights_check(core, engine, store, checkpoint_tier)
            engine.look_at_weights = partial(_look, weights, store, engine)
            gives = (MAPPED.give_back, tiers.giver.ask, engine.give_back)
            for give in gives:
                ram.gives_way(give)
            try:
                await uninterrupted(asyncio.to_thread(engine.start))
                weights.start()
                check_started(ram)
                warn_of_lowered(said, config, ram.text)  # last, where it is seen
                yield OpenedEngine(
                    engine,
                    store,
                    tiers,
                    _nothing if checkpoint_tier is None else checkpoint_tier.forget,
                    checkpoint_tier,
                    engine.is_quiet,
                    _anticipate_tokens_max(config, core),
                )
            finally:
                for give in gives:
                    ram.keeps(give)
                await uninterrupted(_close(engine, weights))
        finally:
            await uninterrupted(asyncio.to_thread(close_tiers, tiers, checkpoint_tier))
    finally:
        MAPPED.bytes_max = 0
        await uninterrupted(asyncio.to_thread(_close_store, store, core))


def _close_store(store: Store, core: Core) -> None:
    store.close()
    core.close()


async def _close(engine: EmbeddedEngine, weights: WeightsCheck) -> None:
    await asyncio.to_thread(weights.close)
    await engine.close()


def _nothing(nodes: Sequence[Node]) -> None:
    """There are no state checkpoints to forget."""


def _anticipate_tokens_max(config: Config, core: Core) -> int:
    """A memory that cannot be cut anywhere has no branch to evaluate ahead."""
    return config.anticipate_tokens_max if config.anticipate and core.can_slice else 0


def _open_store(config: Config, ram: RamLimit) -> tuple[Core, Store]:
    """Lock the store first, so that a second daemon fails before it loads a model."""
    cores: list[Core] = []

    def load(catalog: Catalog) -> ModelIdentity:
        core = load_core(config, catalog, ram)
        cores.append(core)
        known = core.info.row_identity
        return ModelIdentity(known, tokenizer_rules(core.model.path, known.model_hash, catalog))

    try:
        store = Store.open(
            config.store_dir, load, catalog_fd=config.catalog_fd, encrypt=config.encrypt
        )
    except BaseException:
        for core in cores:
            core.close()
        raise
    store.writes.budget = config.write_budget
    store.disk.bytes_max = config.disk_max
    vocab = cores[0].vocab
    keep_vocabulary(store, vocab.pieces, vocab.ptr)
    check_tokenizer(store, lambda text: vocab.tokenize(text, False, False))
    return cores[0], store


def _open_tiers(config: Config, core: Core, store: Store) -> Tiers:
    return Tiers(
        store,
        core.layout,
        v_trans=core.context.v_trans,
        hot_bytes=config.hot_bytes,
        pinned_bytes=min(pinned_bytes(config), core.ram.room // 4),
        ram=core.ram,
        warm_bytes=config.warm_bytes,
        policy=config.policy,
        predictor=config.predictor,
        prefetch_bytes=config.prefetch_bytes,
        ranks_live=True,
        thaws_ahead=True,
        fidelity=cast(Fidelity, config.fidelity),
        forced=LevelFormats.parse(config.level_formats) if config.level_formats else None,
        shrink_after_s=config.shrink_after_s,
        transform_after_s=config.transform_after_s,
        tail=core.memory.tail,
    )


def _weights_check(
    core: Core, engine: EmbeddedEngine, store: Store, checkpoint_tier: CheckpointTier | None
) -> WeightsCheck:
    """What follows when the file under the loaded weights changes: rows are void."""

    def changed(since: float) -> None:
        engine.forget_live()
        store.rows.distrust(since)
        if checkpoint_tier is not None:
            checkpoint_tier.distrust(since)

    return WeightsCheck(core.model.files, store, is_busy=engine.is_busy, on_change=changed)


def _look(weights: WeightsCheck, store: Store, engine: EmbeddedEngine) -> None:
    """Before rows are chosen for a request: once the model's file has changed there are none, also of
    requests that ran at that moment."""
    weights.look()
    if not store.rows.is_trusted:
        engine.forget_live()
