"""Streams that outlive their client, as llama-server's: a request with `X-Conversation-Id` goes on
when its client leaves, and what it wrote is kept for a while, by the byte.

One conversation id has one stream, each tenant its own ids; a new request ends the old one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias

KEEP_S = 300.0
"""How long a stream that has ended can be read; llama-server's figure."""
BYTES_MAX = 4 << 20
"""What is kept of a stream, its end; llama-server's figure."""
STREAMS_MAX = 256
"""Streams that have ended; those that ended longest ago are forgotten beyond."""
Key: TypeAlias = tuple[str, str]
"""A tenant's name and a conversation id."""


class KeptStream:
    """The bytes of one event stream while they come and after. Lives on the event loop."""

    def __init__(self) -> None:
        self.n_dropped = 0
        """Bytes from the beginning that are not kept any more."""
        self.is_done = False
        self.started_s = int(time.time())
        self.completed_s = 0
        self._begun: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        self.work: asyncio.Task[None] | None = None
        self._data = bytearray()
        self._more = asyncio.Event()

    @property
    def n_bytes(self) -> int:
        """Bytes that were ever written."""
        return self.n_dropped + len(self._data)

    async def open(self, headers: Mapping[str, str]) -> None:
        """See `EventStream.open`."""
        self._begun.set_result(headers)

    async def headers(self) -> Mapping[str, str]:
        """Wait until there is something to stream. Raises what failed before."""
        return await asyncio.shield(self._begun)

    async def write(self, data: bytes) -> None:
        """Events as they are."""
        self._data += data
        n_over = max(0, len(self._data) - BYTES_MAX)
        del self._data[:n_over]
        self.n_dropped += n_over
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes. error: why there never was anything."""
        if not self._begun.done():
            self._begun.set_result({}) if error is None else self._begun.set_exception(error)
            self._begun.exception()  # nobody may be there to hear it
        if not self.is_done:
            self.is_done, self.completed_s = True, int(time.time())
            self._wake()

    async def read(self, at: int) -> AsyncIterator[bytes]:
        """The bytes from `at` on, as they come. It ends with the stream, or where bytes that were
        not read yet are not kept any more."""
        while at >= self.n_dropped:
            if at < self.n_bytes:
                data = bytes(self._data[at - self.n_dropped :])
                at += len(data)
                yield data
            elif self.is_done:
                return
            else:
                await self._more.wait()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class KeptStreams:
    """The streams of all tenants. Lives on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[Key, KeptStream] = {}
        """Those that ended in the order of their ends, among those that did not."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, key: Key, stream: KeptStream, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which writes `stream`, whoever listens; a stream of this key ends."""
        self.stop(key)
        self._streams[key] = stream
        stream.work = asyncio.create_task(work)
        self._tasks.add(stream.work)
        stream.work.add_done_callback(lambda task: self._ended(key, stream, task))

    def get(self, key: Key) -> KeptStream | None:
        return self._streams.get(key)

    def find(self, tenant: str, names: Iterable[str]) -> list[tuple[str, KeptStream]]:
        """Those of these names, and of these names with a model's behind them (`name::model`), in
        the order of the names."""
        named: dict[str, list[tuple[str, KeptStream]]] = {}
        for (whose, id), stream in self._streams.items():
            if whose == tenant:
                for name in {id, id.partition("::")[0], id.rpartition("::")[0]}:
                    named.setdefault(name, []).append((id, stream))
        return [each for name in names for each in named.get(name, ())]

    def stop(self, key: Key) -> None:
        """Cancel a stream that still comes, and forget it."""
        stream = self._streams.pop(key, None)
        if stream is not None and stream.work is not None:
            stream.work.cancel()
            stream.end()

    async def close(self) -> None:
        """Cancel all of them."""
        for key in list(self._streams):
            self.stop(key)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, key: Key, stream: KeptStream, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        stream.end(error)
        if self._streams.get(key) is not stream:
            return
        if stream.n_bytes:
            self._keep(key, stream)
        else:  # it failed before there was anything to keep
            del self._streams[key]

    def _keep(self, key: Key, stream: KeptStream) -> None:
        del self._streams[key]
        self._streams[key] = stream  # behind those that ended before
        ended = [each for each, one in self._streams.items() if one.is_done]
        for each in ended[: max(0, len(ended) - STREAMS_MAX)]:
            del self._streams[each]
        asyncio.get_running_loop().call_later(KEEP_S, self._forget, key, stream)

    def _forget(self, key: Key, stream: KeptStream) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]
