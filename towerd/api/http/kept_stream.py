"""Streams that outlive their client, as in llama-server: a request with `X-Conversation-Id`
continues when its client leaves, and its output can be read for a while, from any byte.

A conversation id has one stream, and each tenant has its own ids; a new request ends the old one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias

KEEP_S = 300.0
"""How long a finished stream can be read, as in llama-server."""
BYTES_MAX = 4 << 20
"""How many of the last bytes of a stream are kept, as in llama-server."""
FINISHED_BYTES_MAX = 128 << 20
"""What finished streams may take together; beyond that the one that ended first is dropped."""
READ_BYTES_MAX = 64 * 1024
"""What a reader gets at once: a stream that is not read must not be copied at every step."""
STREAMS_MAX = 256
"""Finished streams that are kept; beyond that the one that ended first is dropped."""
Key: TypeAlias = tuple[str, str]
"""A tenant's name and a conversation id."""


class KeptStream:
    """The bytes of one event stream, during generation and after. Event loop only."""

    def __init__(self) -> None:
        self.is_done = False
        self.started_s = int(time.time())
        self.completed_s = 0
        self._begun: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        self.work: asyncio.Task[None] | None = None
        self._data = bytearray()
        self._n_cut = 0
        """Bytes from the beginning that `_data` does not have any more."""
        self._more = asyncio.Event()

    @property
    def n_bytes(self) -> int:
        """Bytes written so far, including dropped ones."""
        return self._n_cut + len(self._data)

    @property
    def n_dropped(self) -> int:
        """Bytes from the beginning that are no longer kept."""
        return max(0, self.n_bytes - BYTES_MAX)

    @property
    def n_kept(self) -> int:
        """Bytes that are in memory."""
        return len(self._data)

    async def open(self, headers: Mapping[str, str]) -> None:
        """See `EventStream.open`."""
        self._begun.set_result(headers)

    async def headers(self) -> Mapping[str, str]:
        """Wait until there is something to stream. Raises the error that prevented it."""
        return await asyncio.shield(self._begun)

    async def write(self, data: bytes) -> None:
        """Append encoded events."""
        self._data += data
        n_over = len(self._data) - BYTES_MAX
        if n_over > BYTES_MAX // 4:  # not at every event: what is kept is moved
            del self._data[:n_over]
            self._n_cut += n_over
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream. error: why it never began."""
        if not self._begun.done():
            self._begun.set_result({}) if error is None else self._begun.set_exception(error)
            self._begun.exception()  # mark as retrieved: no client may be waiting for it
        if not self.is_done:
            self.is_done, self.completed_s = True, int(time.time())
            self._wake()

    async def read(self, at: int) -> AsyncIterator[bytes]:
        """The bytes from `at` on, as they arrive. Ends with the stream, or early if unread bytes
        have been dropped."""
        while at >= self.n_dropped:
            if at < self.n_bytes:
                start = at - self._n_cut
                data = bytes(memoryview(self._data)[start : start + READ_BYTES_MAX])
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
    """The streams of all tenants. Event loop only."""

    def __init__(self) -> None:
        self._streams: dict[Key, KeptStream] = {}
        """Finished streams are in the order in which they ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, key: Key, stream: KeptStream, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which writes `stream`, independently of clients. An earlier stream of this
        key is stopped."""
        self.stop(key)
        self._streams[key] = stream
        stream.work = asyncio.create_task(work)
        self._tasks.add(stream.work)
        stream.work.add_done_callback(lambda task: self._ended(key, stream, task))

    def get(self, key: Key) -> KeptStream | None:
        return self._streams.get(key)

    def find(self, tenant: str, names: Iterable[str]) -> list[tuple[str, KeptStream]]:
        """The streams with these names, alone or followed by a model's (`name::model`), in the
        order of the names."""
        named: dict[str, list[tuple[str, KeptStream]]] = {}
        for (whose, id), stream in self._streams.items():
            if whose == tenant:
                for name in {id, id.partition("::")[0], id.rpartition("::")[0]}:
                    named.setdefault(name, []).append((id, stream))
        return [each for name in names for each in named.get(name, ())]

    def stop(self, key: Key) -> None:
        """Cancel a stream if it is running, and remove it."""
        stream = self._streams.pop(key, None)
        if stream is not None and stream.work is not None:
            stream.work.cancel()
            stream.end()

    async def close(self) -> None:
        """Cancel all streams."""
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
        else:  # it failed before it wrote anything
            del self._streams[key]

    def _keep(self, key: Key, stream: KeptStream) -> None:
        del self._streams[key]
        self._streams[key] = stream  # after those that ended earlier
        ended = [each for each in self._streams.items() if each[1].is_done]
        n_bytes = sum(one.n_kept for _, one in ended)
        for n_left, (each, one) in zip(range(len(ended), 0, -1), ended, strict=True):
            if n_left <= STREAMS_MAX and n_bytes <= FINISHED_BYTES_MAX:
                break
            n_bytes -= one.n_kept
            del self._streams[each]
        asyncio.get_running_loop().call_later(KEEP_S, self._forget, key, stream)

    def _forget(self, key: Key, stream: KeptStream) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]
