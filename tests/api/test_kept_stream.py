"""How much is kept of a stream, and of how many streams."""

from __future__ import annotations

import asyncio

import pytest

from towerd.api.http import kept_stream
from towerd.api.http.kept_stream import KeptStream, KeptStreams


async def all_of(stream: KeptStream, start: int) -> bytes:
    return b"".join([data async for data in stream.read(start)])


async def test_only_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long stream loses its beginning; readers of the rest are not affected."""
    monkeypatch.setattr(kept_stream, "BYTES_MAX", 10)
    stream = KeptStream()
    await stream.write(b"abcdefgh")
    slow = asyncio.create_task(all_of(stream, 4))
    await stream.write(b"ijkl")
    stream.end()
    assert (stream.n_dropped, stream.n_bytes) == (2, 12)
    assert await slow == b"efghijkl"
    assert await all_of(stream, 1) == b""
    assert await all_of(stream, 12) == b""


async def test_those_that_ended_first_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_stream, "STREAMS_MAX", 2)
    streams, going_on = KeptStreams(), asyncio.Event()

    async def write(stream: KeptStream) -> None:
        await stream.open({})
        await stream.write(b"x")

    async def wait(stream: KeptStream) -> None:
        await write(stream)
        await going_on.wait()

    running = KeptStream()
    streams.start(("ann", "0"), running, wait(running))
    for name in "123":
        stream = KeptStream()
        streams.start(("ann", name), stream, write(stream))
        assert await all_of(stream, 0) == b"x"
        await asyncio.sleep(0)
    assert [name for name in "0123" if streams.get(("ann", name))] == ["0", "2", "3"]
    await streams.close()
    assert running.is_done
