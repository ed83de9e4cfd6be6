"""Chats whose older rows are on disk: what RAM has no room for comes back from there."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from oracle import ask, check_integrity, inside, live_sets, settle, some_ids
from services import EmbeddedService, OpenService
from unnamed import HAS_PROC, unnamed_files

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.offloaded_rows import Pages
from towerd.engine.embedded.live.pages import PageFile, PagesLost
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.longchat.budgets import Budgets
from towerd.engine.embedded.longchat.offload_space import OffloadSpace
from towerd.engine.embedded.longchat.recall import Recall
from towerd.models.bundled import bundled_model
from towerd.retention import Positions

SETTINGS = {
    "threads": 1,
    "retention": "icecache",
    "ctx_size": 1024,
    "recall_every": 16,
    "warm_bytes": 0,
    "hot_bytes": 0,
    "recall_bytes": 1 << 30,
}
LIVE = LiveBudget("icecache", 64)
N_TURNS = 6


async def the_chat(service: EmbeddedService) -> BoundedSet:
    found = await inside(service, lambda: live_sets(service.engine))
    (live_set,) = found
    return live_set


async def with_room(service: EmbeddedService, n_ram: int, n_disk: int) -> OffloadSpace:
    """Space for the index of 900 positions and their keys, `n_ram` rows in RAM and `n_disk` on disk. What a short
    chat does not need for its index is room for rows: only a longer one needs the disk."""
    recall = service.engine.budgets.recall
    assert recall is not None
    room = recall.space
    if n_ram:
        live_set = await the_chat(service)
        rows = room.layout.token_bytes
        n_bytes = 900 * room.position_bytes(live_set)[1] + n_ram * rows
        recall.space = replace(room, bytes_max=n_bytes, disk_bytes_max=n_disk * rows)
    return recall.space


async def chat(
    service: EmbeddedService,
    n_ram: int,
    n_disk: int,
    between: Callable[[OffloadSpace], Awaitable[None]] | None = None,
) -> list[list[int]]:
    """What is answered turn after turn."""
    ids, answers, room = some_ids(150), [], await with_room(service, 0, 0)
    for turn in range(N_TURNS):
        answer = await ask(service, ids, 60, live=LIVE)
        answers.append(answer.ids)
        ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(70, turn)])
        await settle(service)
        if turn == 0:
            room = await with_room(service, n_ram, n_disk)
        elif between is not None:
            await between(room)
    return answers


async def test_what_is_on_disk_comes_back_as_it_was(service_on: OpenService) -> None:
    """The same answers as with room for everything in RAM, and again in a branch of the chat."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        expected = await chat(service, 0, 0)
        assert service.engine.stats()["recall_disk_bytes"] == 0
    async with service_on(bundled_model(), **SETTINGS) as service:

        async def within(room: OffloadSpace) -> None:
            live_set = await the_chat(service)
            assert len(live_set.offloaded.in_ram) <= room.n_ram(live_set)
            assert live_set.n_bytes_offloaded <= room.bytes_max
            assert live_set.offloaded.disk_bytes == service.engine.stats()["recall_disk_bytes"]

        found = await chat(service, 80, 1000, within)
        assert found == expected
        live_set = await the_chat(service)
        assert live_set.offloaded.disk_bytes > 0
        assert len(live_set.offloaded) == live_set.offloaded.end
        on_disk = np.setdiff1d(live_set.offloaded.positions, live_set.offloaded.in_ram)
        assert np.isin(live_set.kept, on_disk).any()
        assert service.engine.stats()["recall_tokens"] > 100


async def test_the_disk_has_its_bounds(service_on: OpenService) -> None:
    """The oldest files go; what is left adds up."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        first = []

        async def within(room: OffloadSpace) -> None:
            live_set = await the_chat(service)
            assert live_set.offloaded.disk_bytes <= room.disk_bytes_max
            assert len(live_set.offloaded.in_ram) <= room.n_ram(live_set)
            live = np.isin(live_set.offloaded.positions, live_set.kept)
            first.append(int(live_set.offloaded.positions[~live][0]))

        await chat(service, 160, 150, within)
        assert first[-1] > first[0]
        assert (await the_chat(service)).offloaded.disk_bytes > 0


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc")
@pytest.mark.parametrize("what", ["damaged", "shorter"])
async def test_lost_pages_are_forgotten(
    service_on: OpenService, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No client sees an error: the chat continues with what RAM has."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        n_lost = []

        async def lose(room: OffloadSpace) -> None:
            live_set = await the_chat(service)
            n_lost.append(live_set.offloaded.disk_bytes)
            for fd in unnamed_files(room.folder):
                if what == "damaged":
                    for at in range(0, os.fstat(fd).st_size, room.layout.token_bytes):
                        os.pwrite(fd, b"\xa5", at)
                else:
                    os.ftruncate(fd, 10)

        answers = await chat(service, 80, 1000, lose)
        assert [len(answer) for answer in answers] == [60] * N_TURNS
        assert max(n_lost[:-1]) > 0
        assert "forgets what is on disk" in caplog.text
        await check_integrity(service)


async def test_a_full_disk(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be written is forgotten where RAM has no room for it."""

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with service_on(bundled_model(), **SETTINGS) as service:

        async def within(room: OffloadSpace) -> None:
            monkeypatch.setattr(Pages, "of", full)
            live_set = await the_chat(service)
            assert len(live_set.offloaded.in_ram) <= room.n_without_disk(live_set)

        await chat(service, 80, 1000, within)
        assert "No space left" in str([record.__dict__ for record in caplog.records])
        offloaded = (await the_chat(service)).offloaded
        assert len(offloaded) < offloaded.end
        await check_integrity(service)


async def test_a_disk_that_fails_at_the_end_of_the_context(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that do not come back while a chat is moved down, those that are live afterwards: its accounts still
    add up, and it answers on. Those that only go down are not read."""
    n_inside = n_lost = 0
    read, move_down = PageFile.read, Recall.move_down

    def lost(file: PageFile, numbers: Positions) -> npt.NDArray[np.uint8]:
        nonlocal n_lost
        if not n_inside:
            return read(file, numbers)
        n_lost += 1
        raise PagesLost("Rows of a long chat cannot be read: Input/output error.")

    def noted(*args: Any) -> None:
        nonlocal n_inside
        n_inside += 1
        try:
            move_down(*args)
        finally:
            n_inside -= 1

    monkeypatch.setattr(Recall, "move_down", noted)
    monkeypatch.setattr(PageFile, "read", lost)
    settings = SETTINGS | {"ctx_size": 400, "live_tokens": 1024}
    async with service_on(bundled_model(), **settings) as service:
        answers = await chat(service, 80, 1000)
        assert [len(answer) for answer in answers] == [60] * N_TURNS
        assert n_lost > 0
        await check_integrity(service)


@pytest.mark.parametrize("disk", ["good", "full"])
async def test_a_prompt_that_is_read_takes_no_more_ram(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """Rows that may be recalled stay within their RAM while a prompt is read, and until the store has them; then
    it has all of them. If the disk takes none, the prompt is read as far as RAM has room before it is thinned;
    then older rows are forgotten, and the chat answers on. Those of the whole chat stay until they are stored."""
    peaks: list[int] = []
    after_step = Budgets.after_step

    def measured(self: Budgets, job: Job) -> None:
        after_step(self, job)
        if job.seq is not None and isinstance(job.seq.live_set, BoundedSet):
            peaks.append(job.seq.live_set.nbytes)

    def full(*_: object) -> Positions:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Budgets, "after_step", measured)
    if disk == "full":
        monkeypatch.setattr(PageFile, "add", full)
    n, batch = 900, {"batch_size": 64, "ubatch_size": 64, "hot_bytes": 1 << 30}
    async with service_on(bundled_model(), **SETTINGS | batch) as service:
        recall = service.engine.budgets.recall
        assert recall is not None
        row = recall.space.layout.token_bytes
        recall.space = replace(recall.space, bytes_max=500 * row, disk_bytes_max=2000 * row)
        ids = some_ids(n)
        answer = await ask(service, ids, 30, live=LIVE)
        assert len(answer.ids) == 30
        await settle(service)
        await check_integrity(service)
        assert max(peaks) < (650 if disk == "good" else 1000) * row
        if disk == "good":
            whole = await ask(service, ids, 8)
            assert whole.finish.reuse.prefill < 20
            assert whole.ids == (await ask(service, ids, 8, scope="other")).ids


async def test_a_full_disk_keeps_the_sink(service_on: OpenService) -> None:
    """The oldest file is forgotten when the disk is full; the first tokens stay live, and every turn is answered."""
    batch = {"batch_size": 64, "ubatch_size": 64, "ctx_size": 1024}
    async with service_on(bundled_model(), **SETTINGS | batch) as service:
        recall = service.engine.budgets.recall
        assert recall is not None
        row = recall.space.layout.token_bytes
        recall.space = replace(recall.space, bytes_max=500 * row, disk_bytes_max=400 * row)
        ids = some_ids(900)
        for turn in range(3):
            answer = await ask(service, ids, 10, live=LiveBudget("icecache", 64, "layer"))
            assert len(answer.ids) == 10
            assert (await the_chat(service)).kept[:4].tolist() == [0, 1, 2, 3]
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(900, turn + 1)])
            await settle(service)


@pytest.mark.parametrize("scope", ["all", "layer"])
async def test_the_end_of_the_context_takes_no_more_ram(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    """When a chat outgrows its context, the rows that go down stay where they are, in RAM or on disk: its RAM
    stays what it was, and what is needed meanwhile is the live rows and a piece. Nothing is forgotten."""
    grown: list[int] = []
    beside: list[int] = []
    move_down = Recall.move_down

    def measured(self: Recall, seq: LiveSeq, live_set: BoundedSet, *args: Any) -> None:
        before, row = live_set.n_bytes_offloaded, self.space.layout.token_bytes
        tracemalloc.start()
        move_down(self, seq, live_set, *args)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        grown.append((live_set.n_bytes_offloaded - before) // row)
        beside.append(peak // row)

    monkeypatch.setattr(Recall, "move_down", measured)
    batch = {"batch_size": 64, "ubatch_size": 64, "ctx_size": 1024, "live_tokens": 1024}
    async with service_on(bundled_model(), **SETTINGS | batch) as service:
        recall = service.engine.budgets.recall
        assert recall is not None
        row = recall.space.layout.token_bytes
        recall.space = replace(recall.space, bytes_max=1000 * row, disk_bytes_max=4000 * row)
        ids = some_ids(900)
        for turn in range(3):
            answer = await ask(service, ids, 30, live=LiveBudget("icecache", 64, scope))
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(400, turn + 1)])
            await settle(service)
        live_set = await the_chat(service)
        assert len(live_set.offloaded) == live_set.offloaded.end > 1700
        await check_integrity(service)
    assert len(grown) >= 1
    assert max(grown) < 100
    assert max(beside) < 5 * 64 + 256


async def test_a_document_that_is_there_is_copied_in_pieces(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that came from elsewhere all at once, such as from another chat, do not have to fit into RAM once
    more before they are on disk."""
    peaks: list[int] = []
    offload_read = Recall.offload_read

    def measured(self: Recall, *args: Any) -> None:
        tracemalloc.start()
        offload_read(self, *args)
        stays, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peaks.append((peak - stays) // self.space.layout.token_bytes)

    monkeypatch.setattr(Recall, "offload_read", measured)
    n = 3000
    async with service_on(
        bundled_model(), **SETTINGS | {"ctx_size": 4096, "live_tokens": 4096}
    ) as service:
        recall = service.engine.budgets.recall
        assert recall is not None
        recall.space = replace(recall.space, disk_bytes_max=1 << 30)
        ids = some_ids(n)
        await ask(service, ids, 1)
        answer = await ask(service, np.concatenate([ids, some_ids(30, 1)]), 20, live=LIVE)
        assert answer.finish.reuse.live >= n - 1
        live_set = await the_chat(service)
        assert len(live_set.offloaded) == live_set.offloaded.end
        await settle(service)
    assert len(peaks) > 0
    assert max(peaks) < n
