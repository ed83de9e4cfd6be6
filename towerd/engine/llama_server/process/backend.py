"""LlamaServerBackend: a llama-server, started or attached, and the results of probing it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from towerd.engine.llama_server.process.attached import (
    Command,
    command_behind,
    may_have_loaded_another,
)
from towerd.engine.llama_server.process.binary import build_of, find_binary, library_env
from towerd.engine.llama_server.process.description import (
    keeps_state,
    open_vocab,
    sliding_window,
)
from towerd.engine.llama_server.process.flags import clashing, names_model, server_env, server_flags
from towerd.engine.llama_server.process.probe import ProbeResult, identify, probe
from towerd.engine.llama_server.process.process import LlamaServerProcess
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.process.upstream_counters import CounterValues, counters, difference
from towerd.engine.llama_server.slot_files.slotdir import SlotDir
from towerd.errors import ConfigError
from towerd.llama_build import waiting_env
from towerd.model.llama_model import LlamaModel
from towerd.models.bundled import find_model
from towerd.settings.config import Config

log = logging.getLogger(__name__)

LOG_NAME = "llama-server.log"


@dataclass(frozen=True, slots=True)
class LlamaServerBackend:
    """A probed llama-server."""

    upstream: UpstreamClient
    slotdir: SlotDir
    probe: ProbeResult
    process: LlamaServerProcess | None
    """None when it was attached: towerd does not start or stop it."""
    model: LlamaModel
    """Its model file without weights, or another one with the same vocabulary."""
    command: Command | None
    """How it was started; None when that cannot be seen."""
    added: CounterValues
    """What the probe added to its counters."""
    is_stale: bool
    """Whether its model's file may have been replaced since it was loaded."""


@asynccontextmanager
async def open_backend(config: Config) -> AsyncIterator[LlamaServerBackend]:
    """Start the llama-server that `config` asks for, or attach to it; stop or leave it at the
    end. Raises ConfigError and ModelError."""
    if config.upstream is None:
        async with _started(config) as backend:
            yield backend
    else:
        async with _attached(config, config.upstream) as backend:
            yield backend


@asynccontextmanager
async def _started(config: Config) -> AsyncIterator[LlamaServerBackend]:
    extra = config.llama_server_args
    if clash := clashing(extra):
        raise ConfigError(f"towerd sets {clash[0]} of llama-server itself: leave it out.")
    binary = find_binary(config.llama_server_bin)
    build = await asyncio.to_thread(build_of, binary)
    build.check(allow_vulnerable=config.allow_vulnerable)
    named_there = config.model is None and names_model(extra)
    path = None if named_there else await asyncio.to_thread(find_model, config.model)
    model = None if path is None else await asyncio.to_thread(open_vocab, path, config)
    slotdir = await asyncio.to_thread(SlotDir.private, config.slot_dir)
    env = {**server_env(os.environ), **library_env(binary), **waiting_env(os.environ)}

    def flags(port: int) -> list[str]:
        has_window = sliding_window(model) > 0
        swa_full = has_window and model is not None and keeps_state(model)
        has_window = has_window and not swa_full
        where = path, slotdir.path, port
        return server_flags(config, *where, has_window=has_window, swa_full=swa_full)

    process = LlamaServerProcess(binary, flags, env=env, log_path=config.store_dir / LOG_NAME)
    hot = f"up to {config.hot_bytes / 2**20:,.0f} MiB for hot conversations (--hot-bytes)"
    logging.getLogger("towerd.memory").info("%s, the rest is llama-server's, see its log", hot)
    log.info("starting llama-server", extra={"binary": str(binary), "build": build.number})
    try:
        await process.start()
        command = Command(tuple(flags(0)), env)
        async with _probed(process.upstream, slotdir, config, process, command, model) as backend:
            yield backend
    finally:
        await process.stop()  # a restart would look at the model's file
        if model is not None:
            model.close()
        await asyncio.to_thread(slotdir.close)


@asynccontextmanager
async def _attached(config: Config, url: str) -> AsyncIterator[LlamaServerBackend]:
    assert config.slot_dir is not None, "Config checks that --upstream comes with --slot-dir"
    slotdir = await asyncio.to_thread(SlotDir.shared, config.slot_dir)
    upstream = UpstreamClient(url, config.upstream_key)
    try:
        await asyncio.to_thread(slotdir.sweep)
        command = await asyncio.to_thread(command_behind, url)
        async with _probed(upstream, slotdir, config, None, command, None) as backend:
            yield backend
    finally:
        await upstream.aclose()
        await asyncio.to_thread(slotdir.close)


@asynccontextmanager
async def _probed(
    upstream: UpstreamClient,
    slotdir: SlotDir,
    config: Config,
    process: LlamaServerProcess | None,
    command: Command | None,
    model: LlamaModel | None,
) -> AsyncIterator[LlamaServerBackend]:
    props = await identify(upstream)
    is_stale = False
    opened: LlamaModel | None = None
    if model is None:
        path = Path(str(props.get("model_path", "")))
        model = opened = await asyncio.to_thread(_open_served, path, config)
        if command is not None and command.pid:
            is_stale = await asyncio.to_thread(may_have_loaded_another, command.pid, path)
    try:
        before = counters(await upstream.metrics())
        found = await probe(
            upstream,
            slotdir,
            window=sliding_window(model),
            has_indexer=model.has_indexer,
            allow_vulnerable=config.allow_vulnerable,
        )
        added = difference(counters(await upstream.metrics()), before)
        if not slotdir.in_ram:
            log.warning("slot states go through a disk", extra={"path": str(slotdir.path)})
        yield LlamaServerBackend(upstream, slotdir, found, process, model, command, added, is_stale)
    finally:
        if opened is not None:
            opened.close()


def _open_served(path: Path, config: Config) -> LlamaModel:
    """The file that an attached llama-server serves, or what `config` names in its place. Raises
    ConfigError."""
    if path.is_file():
        return open_vocab(path, config)
    if config.model is None:
        raise ConfigError(
            f"towerd tokenizes requests itself, but {path}, which the --upstream serves, cannot "
            "be read here: name the same GGUF, or its vocabulary, with -m FILE or -hf OWNER/REPO."
        )
    return open_vocab(find_model(config.model), config)
