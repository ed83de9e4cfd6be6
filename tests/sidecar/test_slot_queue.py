"""Requests that wait for a slot, and the gate between those that name theirs and those that cannot."""

from __future__ import annotations

import asyncio

import pytest
from oracle import some_ids

from towerd.engine.llama_server.slots.launch_gate import LaunchGate
from towerd.engine.llama_server.slots.placement import (
    Costs,
    PlacementPolicy,
    SlotChoice,
    SlotRequest,
)
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.errors import Unavailable


@pytest.fixture
def policy() -> PlacementPolicy:
    return PlacementPolicy(Costs())


async def test_the_queue_is_bounded(policy: PlacementPolicy) -> None:
    """Who comes when it is full is told so at once; who waits gets the slot that is freed."""
    table = SlotTable(policy, 1, queue_max=1, verify=lambda: None)
    first = await table.acquire(SlotRequest(some_ids(5), "a"))
    second = asyncio.create_task(table.acquire(SlotRequest(some_ids(5, 1), "a")))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="1 requests are waiting"):
        await table.acquire(SlotRequest(some_ids(5, 2), "a"))
    table.free(first.slot)
    assert (await second).slot is first.slot
    table.free(first.slot)
    assert (table.n_busy, table.n_waiting) == (0, 0)


async def test_who_leaves_gives_the_slot_back(policy: PlacementPolicy) -> None:
    """Cancelled while waiting, or in the moment it was granted."""
    table = SlotTable(policy, 1, queue_max=5, verify=lambda: None)
    held = await table.acquire(SlotRequest(some_ids(5), "a"))
    waiting = [
        asyncio.create_task(table.acquire(SlotRequest(some_ids(5, i), "a"))) for i in range(3)
    ]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    table.free(held.slot)  # grants the second
    waiting[1].cancel()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(done[2], SlotChoice)
    table.free(done[2].slot)
    assert (table.n_busy, table.n_waiting) == (0, 0)


async def granted(table: SlotTable, *n_tokens: int) -> list[asyncio.Task[SlotChoice]]:
    """Requests of so many tokens each, in this order; done are those that were granted."""
    requests = (SlotRequest(some_ids(n, i), "a") for i, n in enumerate(n_tokens))
    tasks = [asyncio.create_task(table.acquire(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def test_prompts_that_do_not_fit_together_take_turns(policy: PlacementPolicy) -> None:
    """Where all slots share the cells, for llama-server fails all requests that exceed them."""
    table = SlotTable(policy, 4, queue_max=9, verify=lambda: None, cells=512)
    first, second, third = await granted(table, 300, 300, 500)
    assert (first.done(), second.done(), third.done()) == (True, False, False)
    table.free(first.result().slot)
    await asyncio.sleep(0)
    assert (second.done(), third.done()) == (True, False)
    table.free(second.result().slot)
    table.free((await third).slot)  # alone it has to do with what there is
    apart = SlotTable(policy, 4, queue_max=9, verify=lambda: None)
    assert all(task.done() for task in await granted(apart, 300, 300, 500))


async def test_a_short_reply_takes_little_of_the_shared_cells(policy: PlacementPolicy) -> None:
    """A request that may generate 8 tokens needs no room for a long reply."""
    table = SlotTable(policy, 4, queue_max=9, verify=lambda: None, cells=512)
    tasks = [
        asyncio.create_task(table.acquire(SlotRequest(some_ids(240, i), "a", n_predict=8)))
        for i in range(3)
    ]
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, False]
    table.free(tasks[0].result().slot)
    table.free((await tasks[2]).slot)
    table.free(tasks[1].result().slot)


async def test_small_prompts_do_not_pass_a_large_one_for_ever(policy: PlacementPolicy) -> None:
    table = SlotTable(policy, 4, queue_max=20, verify=lambda: None, cells=512)
    running, large, *small = await granted(table, 200, 400, *[20] * 12)
    n_passed = 0
    while not large.done():
        passing = [task for task in small if task.done()]
        n_passed += len(passing)
        small = [task for task in small if not task.done()]
        for slot in {(await task).slot for task in passing or [running]}:
            table.free(slot)
        await asyncio.sleep(0)
    assert n_passed == len(table.slots)
    table.free(large.result().slot)
    for task in small:
        table.free((await task).slot)


async def test_the_gate_keeps_the_two_kinds_apart() -> None:
    """An unpinned request waits for those that are being placed, and holds new ones up."""
    gate = LaunchGate()
    await gate.begin_placing()
    unpinned = asyncio.create_task(gate.begin_unpinned())
    await asyncio.sleep(0)
    later = asyncio.create_task(gate.begin_placing())
    await asyncio.sleep(0)
    assert not unpinned.done()
    assert not later.done()
    gate.end_placing()
    await unpinned
    assert not later.done()
    gate.end_unpinned()
    await later
    gate.end_placing()


async def test_neither_kind_keeps_the_other_out() -> None:
    """Unpinned requests that never leave a gap let another through that came before them; one
    that stops waiting lets those behind it continue."""
    gate = LaunchGate()
    await gate.begin_unpinned()
    placing = asyncio.create_task(gate.begin_placing())
    await asyncio.sleep(0)
    unpinned = [asyncio.create_task(gate.begin_unpinned()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (placing, *unpinned))
    gate.end_unpinned()
    await placing
    assert gate.is_awaited
    behind = asyncio.create_task(gate.begin_placing())
    await asyncio.sleep(0)
    for task in unpinned:
        task.cancel()
    await behind
    assert not gate.is_awaited
    gate.end_placing()
    gate.end_placing()
    await gate.begin_placing()  # nothing is left to wait for
    gate.end_placing()
    await gate.begin_unpinned()
    gate.end_unpinned()
    await gate.begin_placing()
