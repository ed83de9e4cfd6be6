"""A grammar that takes long to read keeps no other request waiting."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from oracle import GREEDY, OpenService, ask, some_ids
from waiting import until_async

from towerd.engine.base import Event, Finish, GenerateRequest, Started
from towerd.errors import InvalidRequest
from towerd.models.bundled import bundled_model
from towerd.service import Service

LONG = (
    "root ::= " + " ".join(f"r{i}" for i in range(20_000)) + "\n"
    + "".join(f'r{i} ::= "x"\n' for i in range(20_000))
)  # fmt: skip
"""Nearly half a megabyte."""
WIDE = "root ::= " + " | ".join(f'"{i}"' for i in range(30_000))
SETTINGS = {"threads": 1, "parallel": 2}
N_GRAMMARS = 6


async def run(service: Service, grammar: str, seen: list[Event]) -> None:
    """A request with a grammar, to its end."""
    sampling = replace(GREEDY, grammar=grammar, ignore_eos=False)
    request = GenerateRequest(ids=some_ids(4), sampling=sampling, n_predict=2)
    async for event in service.sessions.run(request):
        seen.append(event)


async def test_others_are_answered_first(service_on: OpenService) -> None:
    """Of several long grammars, none is begun before a request that came after them all."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        seen: list[Event] = []
        tasks = [asyncio.create_task(run(service, LONG, seen)) for _ in range(N_GRAMMARS)]
        await asyncio.sleep(0)  # each of them has called the engine
        await ask(service, some_ids(5, 1), 1)
        assert sum(isinstance(event, Started) for event in seen) < N_GRAMMARS
        await asyncio.gather(*tasks)
        assert sum(isinstance(event, Finish) for event in seen) == N_GRAMMARS


async def test_one_that_is_refused(service_on: OpenService) -> None:
    """The error is the request's own, and the engine has nothing left of it."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        seen: list[Event] = []
        for grammar in (WIDE, "root ::= ("):
            with pytest.raises(InvalidRequest, match="grammar"):
                await run(service, grammar, seen)
        assert not seen
        assert service.store.sessions() == []
        await ask(service, some_ids(5, 1), 1)
        assert len(service.engine.pool) == 1


async def test_one_that_is_given_up_meanwhile(service_on: OpenService) -> None:
    """A client that leaves while its grammar is read takes it along."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        seen: list[Event] = []
        tasks = [asyncio.create_task(run(service, LONG, seen)) for _ in range(N_GRAMMARS)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.sessions.drain()
        assert not seen
        assert not service.engine.scheduler.waiting
        await until_async(lambda: not service.engine.scheduler.active)


async def test_too_many_are_refused(service_on: OpenService) -> None:
    """As many may be read or wait as requests may."""
    async with service_on(bundled_model(), **SETTINGS, queue_max=3) as service:
        seen: list[Event] = []
        tasks = [asyncio.create_task(run(service, LONG, seen)) for _ in range(N_GRAMMARS)]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [error for error in ended if error is not None]
        assert 0 < len(refused) <= N_GRAMMARS - 3
        assert all("try again later" in str(error) for error in refused)


async def test_many_biases_are_read_apart_as_well(service_on: OpenService) -> None:
    """They are as long to read as a grammar."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        biases = tuple((int(i), -np.inf) for i in range(3, 512)) * 3
        sampling = replace(GREEDY, logit_bias=biases, ignore_eos=False)
        request = GenerateRequest(ids=some_ids(4), sampling=sampling, n_predict=2)
        events = [event async for event in service.sessions.run(request)]
        assert isinstance(events[-1], Finish)
        assert set(events[-1].ids) <= {0, 1, 2}
