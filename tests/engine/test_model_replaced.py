"""A model's file that becomes another one under the same name, size and time: no row is reused."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from oracle import ask, settle, some_ids
from services import OpenService
from waiting import until_async

from lab.models.random_gguf import PRESETS, make_random_gguf


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two of the same size and other weights; the first one's file may be changed."""
    served, other = tmp_path / "served.gguf", tmp_path / "other.gguf"
    for seed, path in enumerate((served, other)):
        make_random_gguf(path, replace(PRESETS["tiny"], n_layer=2), seed=seed)
    assert served.stat().st_size == other.stat().st_size
    assert served.read_bytes() != other.read_bytes()
    return served, other


def overwrite(path: Path, other: Path) -> None:
    """As `cp -p` and rsync --inplace do it: the same inode, size and modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_ino, before.st_size, before.st_mtime_ns) == (
        after.st_ino,
        after.st_size,
        after.st_mtime_ns,
    )


async def test_replaced_between_two_starts(
    service_on: OpenService, models: tuple[Path, Path]
) -> None:
    served, other = models
    prompt = some_ids(90).tolist()
    async with service_on(other, store_dir=other.with_name("apart")) as service:
        expected = await ask(service, prompt)
    async with service_on(served) as service:
        first = await ask(service, prompt)
        await settle(service)
    assert first.ids != expected.ids
    overwrite(served, other)
    async with service_on(served) as service:
        again = await ask(service, prompt)
    assert again.finish.reuse.prefill == len(prompt)
    assert again.ids == expected.ids


async def test_replaced_while_it_is_served(
    service_on: OpenService, models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """It is noticed; what is live, hot and warm is not used, and nothing is stored any more. The
    chat itself is recorded. With the right file back, all is as it was."""
    served, other = models
    original = served.with_name("original.gguf")
    original.write_bytes(served.read_bytes())
    prompt = some_ids(90).tolist()
    async with service_on(served) as service:
        first = await ask(service, prompt, session="s")
        await settle(service)
    async with service_on(served) as service:
        files = service.store.files()
        await ask(service, prompt, session="t")
        overwrite(served, other)
        await until_async(lambda: "is not what was loaded" in caplog.text)
        await until_async(lambda: not len(service.engine.pool))
        await until_async(lambda: service.store.state.hot_bytes == 0)
        longer = prompt + first.ids + some_ids(9, 1).tolist()
        again = await ask(service, longer, session="s")
        assert again.finish.reuse.prefill == len(longer)
        await settle(service)
        assert service.store.state.hot_bytes == 0
        assert service.store.session_ids("s").tolist() == longer + again.ids
    overwrite(served, original)
    async with service_on(served) as service:
        assert {file.path for file in service.store.files()} == {file.path for file in files}
        back = await ask(service, longer, session="s")
        assert back.finish.reuse.warm == first.finish.n_cached


async def test_a_request_right_after_it_is_replaced(
    service_on: OpenService, models: tuple[Path, Path]
) -> None:
    """It does not wait for the next look at the file: no row of the other model is used for it."""
    served, other = models
    prompt = some_ids(90).tolist()
    async with service_on(served) as service:
        first = await ask(service, prompt)
        await settle(service)
        assert (await ask(service, prompt)).finish.reuse.prefill < len(prompt)
        overwrite(served, other)
        again = await ask(service, prompt)
        assert again.finish.reuse.prefill == len(prompt)
        assert again.ids != first.ids


async def test_a_request_that_ran_while_it_was_replaced(
    service_on: OpenService, models: tuple[Path, Path]
) -> None:
    """Its rows are of both models, so what follows it is evaluated anew."""
    served, other = models
    prompt = some_ids(90).tolist()
    async with service_on(served, anticipate=False) as service:
        running = asyncio.create_task(ask(service, prompt, 60))
        await until_async(service.engine.is_busy)
        overwrite(served, other)
        await ask(service, [*prompt, 301])
        reply = await running
        longer = [*prompt, *reply.ids, 302]
        assert (await ask(service, longer)).finish.reuse.prefill == len(longer)
        assert (await ask(service, prompt)).finish.reuse.prefill == len(prompt)
