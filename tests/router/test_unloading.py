"""How long a model's process may take to end: requests and all that it writes have one deadline together."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from towerd.router.loading import models, process
from towerd.router.loading.entry import ModelEntry
from towerd.router.loading.metrics import RouterMetrics
from towerd.router.loading.model import RoutedModel, State
from towerd.router.loading.models import Models
from towerd.router.loading.process import ModelProcess
from towerd.router.loading.room import Room
from towerd.settings.model_tables import ModelTable
from towerd.store.catalog.shared.broker import CatalogConnection

STOP_S, WRITE_S = 6.0, 3.0
DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1]).write_text(str(time.monotonic())))
print("{}", flush=True)
while True:
    signal.pause()
"""
"""A program that notes when it was told to end, and does not."""
Unload = Callable[[Models, RoutedModel, ModelProcess], None]


async def make(model: RoutedModel) -> ModelProcess:
    raise AssertionError(f"{model.name} is loaded already")


async def unloaded(unload: Unload) -> tuple[float, float]:
    """time.monotonic() when the unloading of a model with a request that never ends began, and when its
    process had been killed."""
    ours, theirs = socket.socketpair()
    made = ModelProcess("embedded", CatalogConnection(theirs, lambda: False))
    await made.start()
    with ours:
        await made.load(lambda share: None)
        model = RoutedModel(ModelEntry("deaf", "preset"), ModelTable(), 0)
        model.state, model.process, model.n_running = State.LOADED, made, 1
        every = Models({"deaf": model}, Room(1 << 30, 0), make, RouterMetrics())
        began = time.monotonic()
        unload(every, model, made)
        assert await made.wait() == -signal.SIGKILL
        return began, time.monotonic()


def seconds(told: Path, unload: Unload) -> tuple[float, float]:
    """Until the process was told to end, and until it was killed."""
    began, ended = asyncio.run(unloaded(unload))
    return float(told.read_text()) - began, ended - began


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a process notes when it was told to end; the times are shorter."""
    path = tmp_path / "told"
    for module in (models, process):
        monkeypatch.setattr(module, "STOP_S_MAX", STOP_S)
    monkeypatch.setattr(models, "WRITE_S", WRITE_S)
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", DEAF, str(path)))
    return path


def test_a_request_that_never_ends(told: Path) -> None:
    """The process is told in time to write what is live, and is killed when all the time has passed, not
    twice that."""
    told_s, killed_s = seconds(told, lambda every, model, _: every.begin_unload(model))
    assert STOP_S - WRITE_S <= told_s < STOP_S <= killed_s < STOP_S + WRITE_S


def test_a_process_that_accepts_nothing(told: Path) -> None:
    """It is told to end at once: nothing is waited for that may wait for it."""
    told_s, killed_s = seconds(told, Models.give_up)
    assert told_s < WRITE_S
    assert STOP_S <= killed_s < STOP_S + WRITE_S
