"""A router on simulated sockets with simulated processes: nothing is found, and what is planted is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from simulate import Failure, simulated_router

from towerd.errors import TowerdError
from towerd.router.http.request import RoutedRequest
from towerd.router.loading import models
from towerd.router.loading.model import RoutedModel, State
from towerd.router.loading.models import Models
from towerd.router.loading.process import STOP_S_MAX, ModelProcess

SEEDS = 30
PLANTED_SEEDS = 200


def test_nothing_is_found() -> None:
    """Clients that leave, models that come and go, processes that die, stop, hang and refuse."""
    for seed in range(SEEDS):
        failure, _ = simulated_router(seed)
        assert failure is None, failure.text()


def test_a_seed_is_the_same_again() -> None:
    """Down to the steps of the loop and the bytes that arrived."""
    first, again = simulated_router(3)[1], simulated_router(3)[1]
    assert first == again
    assert len(first) > 20


class Changed(ModuleType):
    """A module, some names of which mean something else where it is used under this name."""

    def __init__(self, real: ModuleType, **names: object) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(real.__dict__ | names)


def unload_that_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A process is killed, whatever it answers, and what is live is not written."""

    async def stop(self: ModelProcess, deadline_s: float) -> None:
        self.kill()
        await self.wait()

    patch.setattr(ModelProcess, "stop", stop)


def unload_that_cuts_off(patch: pytest.MonkeyPatch) -> None:
    """A process is told to end while it answers, and while requests are on their way to it."""
    real: Callable[..., Any] = ModelProcess.stop

    async def stop(self: ModelProcess, deadline_s: float) -> None:
        await real(self, deadline_s + STOP_S_MAX)

    patch.setattr(models, "STOP_S_MAX", 0.0)
    patch.setattr(ModelProcess, "stop", stop)


def unload_of_a_busy_model(patch: pytest.MonkeyPatch) -> None:
    """Which models are busy is not looked at."""
    unload_that_cuts_off(patch)
    occupies = RoutedModel.occupies

    def seen(self: RoutedModel, beside: RoutedModel | None = None) -> Any:
        return replace(occupies(self, beside), is_busy=self.state is State.LOADING)

    patch.setattr(RoutedModel, "occupies", seen)


def client_that_leaves_stays_counted(patch: pytest.MonkeyPatch) -> None:
    """A request whose client has left keeps its model busy."""
    leave: Callable[..., None] = Models.leave

    def left(self: Models, model: RoutedModel, *, is_use: bool = True) -> None:
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            leave(self, model, is_use=is_use)

    patch.setattr(Models, "leave", left)


def load_that_goes_with_its_first_client(patch: pytest.MonkeyPatch) -> None:
    """A client that leaves while its model is loading takes the load with it."""
    patch.setattr(models, "asyncio", Changed(asyncio, shield=lambda work: work))


def preempted_job(patch: pytest.MonkeyPatch) -> None:
    """A model that is idle is chosen, and its process ended a moment later without another look."""
    begin: Callable[..., None] = Models.begin_unload

    def begin_later(self: Models, model: RoutedModel) -> None:
        process = model.process
        if process is None or model.state is not State.LOADED or model.occupies().is_busy:
            begin(self, model)
            return

        async def end() -> None:
            await asyncio.sleep(0.02)
            if model.process is process:
                model.state = State.STOPPING
                await process.stop(time.monotonic() + STOP_S_MAX)

        late.add(asyncio.create_task(end()))

    late: set[asyncio.Task[None]] = set()
    patch.setattr(Models, "begin_unload", begin_later)


def room_for_two(patch: pytest.MonkeyPatch) -> None:
    """A model that is being loaded takes no room yet."""

    def is_running(self: RoutedModel) -> bool:
        return self.state in (State.LOADED, State.STOPPING)

    patch.setattr(RoutedModel, "is_running", property(is_running))


def room_before_it_is_free(patch: pytest.MonkeyPatch) -> None:
    """A model that was told to end takes no room any more."""

    def is_running(self: RoutedModel) -> bool:
        return self.state in (State.LOADED, State.LOADING)

    patch.setattr(RoutedModel, "is_running", property(is_running))


def request_that_is_sent_twice(patch: pytest.MonkeyPatch) -> None:
    """One whose process has ended is sent again, though it may have been answered."""
    opened: Callable[..., Any] = RoutedRequest.open

    async def open_again(self: RoutedRequest) -> None:
        try:
            await opened(self)
        except TowerdError:
            await opened(self)

    patch.setattr(RoutedRequest, "open", open_again)


PLANTED = (
    unload_that_waits_for_nothing,
    unload_that_cuts_off,
    unload_of_a_busy_model,
    client_that_leaves_stays_counted,
    load_that_goes_with_its_first_client,
    preempted_job,
    room_for_two,
    room_before_it_is_free,
    request_that_is_sent_twice,
)


def failures() -> Iterator[Failure]:
    """Of the seeds that find something."""
    for seed in range(PLANTED_SEEDS):
        failure, _ = simulated_router(seed)
        if failure is not None:
            yield failure


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the seeds, with what is needed to look at it again."""
    plant(monkeypatch)
    failure = next(failures(), None)
    assert failure is not None
    assert f"SEED={failure.seed}" in failure.text()
