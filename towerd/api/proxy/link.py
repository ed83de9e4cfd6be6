"""The way to llama-server: raw requests, and what an engine offers the pass-through."""

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


class Upstream(Protocol):
    """Where llama-server listens."""

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


class Lease(Protocol):
    """One request's hold on one slot, given back on exit."""

    workflow: str | None
    """The workflow that the client names."""
    agent: str | None
    """Who asks, named or told apart by system prompt and tools."""
    session: str | None
    """The session that its turn is recorded under; None: it is recognised then."""
    calls_tools: bool
    """Whether the reply ended with a call of a tool."""
    answered: AnsweredChat | None
    """The chat request that it was, when it got its reply."""

    @property
    def slot(self) -> int: ...
    @property
    def reuse(self) -> Reuse: ...

    def learn(self, ids: Ids) -> None:
        """The prompt's tokens, of a lease that was had before they were known."""
        ...

    async def launched(self) -> None:
        """The request runs in its slot."""
        ...

    def answering(self) -> None:
        """The reply has begun."""
        ...

    def ran_elsewhere(self) -> None:
        """The request ran in another slot; to be told before `finished`."""
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
        """Say what the slot holds now; the turn that is to be recorded, if any."""
        ...

    async def __aenter__(self) -> Lease: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Unpinned(Protocol):
    """A request that llama-server places itself."""

    def launched(self) -> None:
        """Its reply has begun."""
        ...


class Sidecar(Engine, Protocol):
    """`towerd.engine.llama_server.engine.LlamaServerEngine` as the pass-through sees it."""

    @property
    def upstream(self) -> Upstream: ...
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
    ) -> Lease:
        """A slot with as much of `ids` in it as the store has; for a request that cannot name it
        (not `pinned`) one that llama-server would choose. Raises Unavailable."""
        ...

    def lease_chat(self, spoken: ChatText, scope: str, session: str | None) -> Lease | None:
        """The slot of a chat that goes on where it sits, before its tokens are known."""
        ...

    async def text_of_chat(self, data: bytes) -> str:
        """A chat request, as its client wrote it, to the prompt text. Raises TowerdError."""
        ...

    async def lease_opaque(self, scope: str, *, label: str) -> Lease:
        """A slot for a prompt whose ids nobody knows. Raises Unavailable."""
        ...

    def unpinned(self, scope: str) -> AbstractAsyncContextManager[Unpinned]:
        """Around a request that llama-server places itself. Raises Unavailable."""
        ...

    def notice(self, error: TowerdError) -> None:
        """A request to llama-server failed like this."""
        ...

    def without_own(self, metrics: bytes) -> bytes:
        """llama-server's Prometheus text without what towerd's probe added to it."""
        ...

    async def lora_changed(self) -> None:
        """The scales of LoRA adapters were set."""
        ...


def sidecar_of(request: web.Request) -> Sidecar:
    """The engine behind the pass-through; see `service_of`."""
    return cast(Sidecar, service_of(request).engine)


class Link:
    """The way to llama-server, and what goes on after its client left."""

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
        """While a reply is followed for nobody; the event is set when the daemon leaves."""
        leaving = asyncio.Event()
        if self._is_closing:
            leaving.set()
        self._unattended.add(leaving)
        try:
            yield leaving
        finally:
            self._unattended.discard(leaving)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` apart from the request that it belongs to."""
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
        """Send one request as it stands (`path` is quoted, with its query) and return when the
        reply's head is there. Raises Unavailable when llama-server is not, TowerdError when its
        reply cannot be read, and what iterating the body raises."""
        if not engine.is_running:
            raise Unavailable(_DOWN)
        try:
            return await engine.upstream.send(method, path, headers, body)
        except NotHttp as error:
            raise TowerdError(_BAD_HTTP) from error
        except (Lost, Unreachable) as error:
            failure = Unavailable(LOST if isinstance(error, Lost) else _DOWN)
            # llama-server closes on a body that it does not want; that says nothing about it.
            if not isinstance(body, AsyncIterator):
                engine.notice(failure)
            raise failure from error


LINK = web.AppKey("link", Link)
