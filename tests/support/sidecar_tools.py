"""Asking a llama-server engine that a test opened."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from waiting import until_async

from towerd.engine.base import Finish, GenerateRequest, Piece
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.process.binary import library_env
from towerd.engine.llama_server.process.process import LlamaServerProcess
from towerd.engine.llama_server.slots.placement import Costs
from towerd.sessions.sessions import Sessions
from towerd.settings.config import Config
from towerd.store import Store
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What `open_llama_server` opens, with the sessions on it."""

    config: Config
    engine: LlamaServerEngine
    store: Store
    tiers: Tiers
    sessions: Sessions


class SteadyCosts(Costs):
    """Fixed costs instead of measured ones, so that decisions do not depend on the machine."""

    def observe_prefill(self, n: int, ms: float) -> None: ...
    def observe_restore(self, n: int, ms: float) -> None: ...
    def observe_save(self, n: int, ms: float) -> None: ...


OpenSidecar = Callable[..., AbstractAsyncContextManager[Sidecar]]


def prompt(n: int, seed: int = 0) -> Ids:
    """Ordinary tokens of a vocabulary of 512."""
    return np.random.default_rng(seed).integers(260, 500, n).astype(np.int32)


async def ask(
    sidecar: Sidecar, ids: Any, n_predict: int = 8, stop: tuple[str, ...] = (), **more: Any
) -> tuple[str, Finish]:
    """Run a greedy request to its end: its text and its Finish."""
    fields = {**GREEDY, "stop": stop}
    request = GenerateRequest(np.asarray(ids, np.int32), fields=fields, n_predict=n_predict, **more)
    text, last = "", None
    async for event in sidecar.sessions.run(request):
        if isinstance(event, Piece):
            text += event.text
        if isinstance(event, Finish):
            last = event
    assert last is not None
    return text, last


@asynccontextmanager
async def alone(
    binary: Path, model: Path, root: Path, *flags: str
) -> AsyncIterator[LlamaServerProcess]:
    """A llama-server without towerd, with one slot unless the flags say otherwise."""

    def command(port: int) -> list[str]:
        base = ["-m", str(model), "--port", str(port), "-np", "1", "-t", "1"]
        return [*base, "--no-warmup", "--cache-ram", "0", *flags]

    env = {**os.environ, **library_env(binary)}
    process = LlamaServerProcess(binary, command, env=env, log_path=root / "alone.log")
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


async def running_again(sidecar: Sidecar) -> None:
    """Wait until the child that was killed has been replaced by one that serves."""
    process = sidecar.engine.backend.process
    assert process is not None
    before = process.restarts
    await until_async(lambda: process.restarts > before and sidecar.engine.availability.is_running)
