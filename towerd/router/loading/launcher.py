"""Launcher: makes the models of a router and their processes from its settings.

The one place where a model's settings become those of a process, and where the RAM for
conversations is divided.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from towerd.router.loading.entry import ModelEntry, find_entries
from towerd.router.loading.model import RoutedModel
from towerd.router.loading.process import ModelProcess
from towerd.router.loading.room import Room
from towerd.settings.config import Config, chats_bytes
from towerd.settings.model_tables import ModelTables
from towerd.store.catalog.shared.broker import CatalogBroker
from towerd.system.ram_limit import own_bytes

log = logging.getLogger(__name__)

EMBEDDED = "embedded"
CONTEXT_RAM_SHARE = 8
"""A live context whose size is not set takes at most this part of the RAM."""
NAME_CHARS_MAX = 100
"""Of a model's name in the name of a file."""
PROCESS_BYTES = 150 * 2**20
"""What a process takes besides its model."""
ROOM_BYTES = 160 * 2**20
"""What it needs besides where RAM is limited: small compute buffers, and room for requests."""
SPARE_RAM_MIN = 4 * 2**30
"""With less RAM no process is kept in reserve."""
ROUTER_ROOM_MIN, ROUTER_SHARE = 32 * 2**20, 32
"""Requests in the router may take so many bytes, or one in so many parts of a limited RAM."""
KEPT_SHARE = 0.97
"""Share of a limited RAM that is given away: the rest is for what was not foreseen."""


class Launcher:
    """Settings of all models. Their processes share one store, whose catalog `broker` has."""

    def __init__(self, tables: ModelTables, folder: Path, broker: CatalogBroker) -> None:
        """folder: a private one, for sockets."""
        config = tables.config
        self.room_of_router = max(ROUTER_ROOM_MIN, config.ram_max // ROUTER_SHARE)
        """RAM for requests in this process, where it is limited."""
        self.room = Room(self._memory(config), config.models_max, is_limited=config.ram_max > 0)
        self._tables = tables
        self._folder = folder
        self._broker = broker
        self._numbers = itertools.count()
        self._spare: ModelProcess | None = None
        self._sparing: asyncio.Task[None] | None = None
        self._entries: Mapping[str, ModelEntry] = {}

    def _memory(self, config: Config) -> int:
        """RAM for all models together, of which the router takes its own part, in bytes."""
        if not config.ram_max:
            return config.memory
        own = own_bytes() + self.room_of_router
        spare = PROCESS_BYTES if config.ram_max >= SPARE_RAM_MIN else 0
        return min(config.memory, max(1, int(config.ram_max * KEPT_SHARE) - own - spare))

    @property
    def spare_pid(self) -> int | None:
        """The process in reserve, if there is one."""
        spare = self._spare
        return None if spare is None or spare.exit_code is not None else spare.pid

    def models(self) -> dict[str, RoutedModel]:
        """All models that there are now, not loaded. Raises ConfigError if the directory cannot be
        read, or a model cannot have its settings."""
        self._entries = find_entries(self._tables)
        return {name: self._model(entry) for name, entry in self._entries.items()}

    def _model(self, entry: ModelEntry) -> RoutedModel:
        """One model, not loaded. Raises ConfigError."""
        config = self._config(entry, self._folder / "s")
        table = self._tables.table(entry.name)
        return RoutedModel(entry, table, need_bytes=_estimate(entry, config))

    async def process(self, model: RoutedModel) -> ModelProcess:
        """A process for a model, which is not loaded yet. Raises ConfigError."""
        socket = self._folder / str(next(self._numbers))
        config = await asyncio.to_thread(self._config, model.entry, socket)
        spare = self._take_spare(config.engine)
        process = spare or await self._new(config.engine)
        process.assign(config)
        self.keep_spare(after=process if spare is None else None)
        return process

    def _take_spare(self, engine: str) -> ModelProcess | None:
        """The process in reserve, if it lives and is one for this engine."""
        spare = self._spare
        if spare is None or spare.engine != engine:
            return None
        self._spare = None
        return spare if spare.exit_code is None else None

    def keep_spare(self, after: ModelProcess | None = None) -> None:
        """Have a process in reserve that has its imports done, where there are models to switch
        between, and RAM for it. after: a process that has yet to do its own, whose model is loaded first. The one
        in reserve does them while a model is loaded, which keeps one core busy."""
        ram_max = self._tables.config.ram_max
        if 0 < ram_max < SPARE_RAM_MIN:
            return
        if len(self._entries) > 1 and (self._sparing is None or self._sparing.done()):
            self._sparing = asyncio.create_task(self._make_spare(after))

    async def _make_spare(self, after: ModelProcess | None) -> None:
        if after is not None:
            await after.is_settled.wait()
        if self._spare is None or self._spare.exit_code is not None:
            spare = await self._new(EMBEDDED)
            try:
                await spare.start()
            except OSError as error:
                log.warning("no process in reserve", extra={"error": str(error)})
                return
            self._spare = spare

    async def _new(self, engine: str) -> ModelProcess:
        return ModelProcess(engine, await asyncio.to_thread(self._broker.connect))

    async def close(self) -> None:
        """End the process in reserve."""
        if self._sparing is not None:
            self._sparing.cancel()
            await asyncio.wait((self._sparing,))
        if self._spare is not None:
            await self._spare.end()

    def _config(self, entry: ModelEntry, socket: Path) -> Config:
        own = {"alias": entry.name, "socket": socket, "behind_router": True}
        if entry.path is not None:
            own["model"] = entry.path
        own["hot_bytes"] = self._hot_bytes(entry)
        config = self._tables.config_of(entry.name, entry.server_args, **own)
        if config.record is None:
            return config
        return replace(config, record=trace_of(config.record, entry.name, self._entries))

    def _hot_bytes(self, entry: ModelEntry) -> int:
        """A model's share of --hot-bytes: what its table says; the others divide what is left by how
        many can be loaded at once."""
        said = {
            name: int(self._tables.table(name).values["hot_bytes"])
            for name in self._entries
            if "hot_bytes" in self._tables.table(name).values
        }
        if entry.name in said:
            return said[entry.name]
        n_others = max(1, len(self._entries) - len(said))  # this one may have just left
        n_at_once = min(n_others, self.room.models_max or n_others)
        return max(0, self._tables.config.hot_bytes - sum(said.values())) // n_at_once


def trace_of(path: Path, name: str, names: Collection[str]) -> Path:
    """The trace of one model beside `path`: `trace.NAME.jsonl` for `trace.jsonl`. No two of `names`
    have the same, also where the file system does not tell cases apart."""
    quoted = quote(name, safe=" ")
    is_shared = sum(each.casefold() == name.casefold() for each in names) > 1
    if is_shared or len(quoted) > NAME_CHARS_MAX:
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        quoted = f"{quoted[:NAME_CHARS_MAX]}+{digest}"  # `quote` leaves no "+"
    return path.with_name(f"{path.stem}.{quoted}{path.suffix}")


def _estimate(entry: ModelEntry, config: Config) -> int:
    """RAM that a model takes before it was measured: rather too much than too little."""
    context = config.ram_bytes // CONTEXT_RAM_SHARE
    if config.ram_max:
        context += ROOM_BYTES
    return entry.file_bytes() + context + chats_bytes(config) + PROCESS_BYTES
