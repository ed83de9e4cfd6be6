"""The connection to llama-server: raw requests, and the protocols of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, cast

from aiohttp import ClientResponse, web

from towerd.api.http.keys import service_of
from towerd.engine.base import Engine, Reuse
from towerd.engine.llama_server.process.client import Body, Lost, NotHttp, Unreachable
from towerd.engine.llama_server.slots.chat_text import AnsweredChat, ChatText
from towerd.engine.llama_server.slots.slot_lease import LeasedTurn
from towerd.errors import TowerdError, Unavailable
from towerd.tokens import Ids

LOST = "llama-server ended while it answered; try again"
_BAD_HTTP = "llama-server's reply is not valid HTTP"
_DOWN = "llama-server is not running at the moment; try again"


class UpstreamClient(Protocol):
    """A client of the llama-server process."""

    def auth(self) -> Mapping[str, str]:
        """The headers that carry its private key."""
        ...

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: Body = None
    ) -> ClientResponse:
        """See `towerd.engine.llama_server.process.client.Client.send`."""
        ...

    async def slots(self) -> list[dict[str, Any]]:
        """GET /slots. Raises TowerdError."""
        ...


class SlotLease(Protocol):
    """One request's lease of one slot, released on exit."""

    workflow: str | None
    """The workflow that the client named."""
    agent: str | None
    """The agent, as named by the client, or identified by system prompt and tools."""
    session: str | None
    """The session that its turn is recorded under; None: recognised when it is recorded."""
    calls_tools: bool
    """Whether the reply ended with a call of a tool."""
    answered: AnsweredChat | None
    """The chat request with its reply, once answered."""

    @property
    def slot(self) -> int: ...
    @property
    def reuse(self) -> Reuse: ...

    def learn(self, ids: Ids) -> None:
        """Set the prompt's tokens of a lease that was taken before they were known."""
        ...

    async def launched(self) -> None:
        """The request is running in its slot."""
        ...

    def answering(self) -> None:
        """The reply has begun."""
        ...

    def ran_elsewhere(self) -> None:
        """The request ran in another slot; must be called before `finished`."""
        ...

    async def finished(
        self,
        *,
        reply_ids: Sequence[int] | None,
        reply_text: str,
        cache_n: int | None,
        stop: str,
        prompt_ms: float | None = None,
    ) -> LeasedTurn | None:
        """Report what the slot holds now; returns the turn to record, if any."""
        ...

    async def __aenter__(self) -> SlotLease: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class UnpinnedRequest(Protocol):
    """A request that llama-server places itself."""

    def launched(self) -> None:
        """The reply has begun."""
        ...


class Sidecar(Engine, Protocol):
    """`towerd.engine.llama_server.engine.LlamaServerEngine` as the proxy sees it."""

    @property
    def upstream(self) -> UpstreamClient: ...
    @property
    def is_running(self) -> bool: ...

    async def lease(
        self,
        ids: Ids,
        scope: str,
        session: str | None,
        *,
        compose: bool = True,
        pinned: bool = True,
    ) -> SlotLease:
        """Lease a slot and restore as much of `ids` into it as is stored; for a request that cannot
        name a slot (not `pinned`) one that llama-server would choose. Raises Unavailable."""
        ...

    def lease_chat(self, spoken: ChatText, scope: str, session: str | None) -> SlotLease | None:
        """Lease the slot of a chat that continues in it, before its tokens are known; None: no
        slot holds it."""
        ...

    async def text_of_chat(self, data: bytes) -> str:
        """The prompt text of a chat request as the client wrote it. Raises TowerdError."""
        ...

    async def lease_opaque(self, scope: str, *, label: str) -> SlotLease:
        """Lease a slot for a prompt with unknown ids. Raises Unavailable."""
        ...

    def unpinned(self) -> AbstractAsyncContextManager[UnpinnedRequest]:
        """A context for a request that llama-server places itself. Raises Unavailable."""
        ...

    def notice(self, error: TowerdError) -> None:
        """Take note that a request to llama-server failed with `error`."""
        ...

    def without_own(self, metrics: bytes) -> bytes:
        """llama-server's Prometheus text without what towerd's probe added to it."""
        ...

    async def lora_changed(self) -> None:
        """The scales of LoRA adapters were set."""
        ...


def sidecar_of(request: web.Request) -> Sidecar:
    """The engine behind the proxy; see `service_of`."""
    return cast(Sidecar, service_of(request).engine)


class Link:
    """The connection to llama-server, and the tasks that continue after their client has left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._unattended: set[asyncio.Event] = set()
        self._is_closing = False

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """For `app.cleanup_ctx`."""
        yield
        self._is_closing = True
        for leaving in self._unattended:
            leaving.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @contextmanager
    def unattended(self) -> Iterator[asyncio.Event]:
        """A context for reading a reply without a client; the event is set at shutdown."""
        leaving = asyncio.Event()
        if self._is_closing:
            leaving.set()
        self._unattended.add(leaving)
        try:
            yield leaving
        finally:
            self._unattended.discard(leaving)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a task of its own, independent of its request."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def request(
        self,
        engine: Sidecar,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Body = None,
    ) -> ClientResponse:
        """Send one request unchanged (`path` is quoted, with its query) and return when the reply's
        head is there. Raises Unavailable if llama-server is unavailable, TowerdError if its reply
        cannot be read, and the errors of iterating the body."""
        if not engine.is_running:
            raise Unavailable(_DOWN)
        try:
            return await engine.upstream.send(method, path, headers, body)
        except NotHttp as error:
            raise TowerdError(_BAD_HTTP) from error
        except (Lost, Unreachable) as error:
            failure = Unavailable(LOST if isinstance(error, Lost) else _DOWN)
            # llama-server closes the connection on a body that it refuses; it may still be well.
            if not isinstance(body, AsyncIterator):
                engine.notice(failure)
            raise failure from error


LINK = web.AppKey("link", Link)
