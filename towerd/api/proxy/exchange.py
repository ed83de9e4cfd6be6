"""One generation through the proxy, from the request's last byte to the reply's last byte."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from urllib.parse import quote

from aiohttp import ClientResponse, web

from towerd.api.http.backlog import Backlog
from towerd.api.http.bodies import release_body
from towerd.api.http.hints import SESSION_HEADER
from towerd.api.http.keys import METRICS, TENANT, service_of
from towerd.api.http.reply import error_event, reshaped_event
from towerd.api.http.requests.log import log_finished
from towerd.api.http.requests.recent import RECENT
from towerd.api.llama.completion import REUSE_HEADER
from towerd.api.proxy.forward import body_of, copy, head_of, read
from towerd.api.proxy.headers import to_client, to_upstream
from towerd.api.proxy.link import LINK, LOST
from towerd.api.proxy.plan import ProxyPlan
from towerd.api.proxy.relay import EVENT_STREAM
from towerd.api.proxy.slot_prefill import SlotPrefill
from towerd.api.proxy.splice import without_slot, without_token_ids
from towerd.api.proxy.watch import Dialect, EventSplitter, ReplyWatch, event_data
from towerd.cold.cold_tier import RequestGuard
from towerd.engine.base import Finish, Reuse
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.slots.slot_lease import SlotLease
from towerd.engine.llama_server.slots.unpinned_request import UnpinnedRequest
from towerd.errors import InvalidRequest, TowerdError, Unavailable

log = logging.getLogger(__name__)

CONVERSATION = "X-Conversation-Id"
READ_INLINE_BYTES_MAX = 256 * 1024
EVENT_BYTES_MAX = 16 * 1024
"""Bytes of a stream processed in one step of the event loop: about a hundred events."""
PROGRESS = b'"prompt_progress":'
"""What is in an event about the prompt, before the first token; in a text its quotes are escaped."""
ERROR = b"event: error"
"""How llama-server's error event begins in streams of `/v1/messages`."""


class Exchange:
    """A generation request and its reply. Call `run` once; it releases the lease."""

    def __init__(self, request: web.Request, engine: LlamaServerEngine, plan: ProxyPlan) -> None:
        self.headers = to_upstream(request.headers, engine.upstream.auth())
        self.lease: SlotLease | None = None
        """The leased slot; None: llama-server chooses."""
        self.use: RequestGuard | None = None
        """The announcement to the cold tier."""
        self.learning: asyncio.Task[None] | None = None
        """Determines the prompt's tokens if the slot was known before them."""
        self.unpinned: UnpinnedRequest | None = None
        self.is_resumable = False
        """Whether llama-server continues when the connection ends."""
        self._request = request
        self._engine = engine
        self._plan = plan
        self._watch = ReplyWatch(plan.dialect)
        self._splitter = EventSplitter()
        self._reply: ClientResponse | None = None
        self._prefill: SlotPrefill | None = None
        # Taken now: while the daemon stops it is not to be had, but turns that end are recorded.
        self._recorder = service_of(request).sessions.recorder
        self._sees_slots = request[TENANT].sees_all
        self._session = ""
        self._started = False
        self._recording: asyncio.Task[None] | None = None
        self._began = time.monotonic()
        self._ttft_s: float | None = None

    async def run(self) -> web.StreamResponse:
        """Forward the request and the reply.

        Raises Unavailable and the errors of recording the turn, before anything was sent."""
        link = self._request.app[LINK]
        try:
            response = await self._pass()
        except (asyncio.CancelledError, ConnectionError):
            # The client left. This task is being cancelled, so clean up in another one.
            link.later(self._drain() if self._continues() else self._abandon())
            raise
        except BaseException:
            await self._abandon()
            raise
        await self._leave()
        return response

    # --- the request ----------------------------------------------------------------------

    async def _pass(self) -> web.StreamResponse:
        slot = self.lease.slot if self.lease is not None else None
        link = self._request.app[LINK]
        body = await self._plan.bytes_for(slot)
        if self.lease is not None:
            self.lease.t_began = self._began
        if self.lease is not None and not self._plan.can_pin:
            self._prefill = SlotPrefill(link, self._engine, self.lease, self._plan)
            await self._prefill.run()
        path = self._request.rel_url.raw_path_qs
        self._reply = await link.request(self._engine, "POST", path, self.headers, body)
        release_body(self._request)  # those that still wait for a slot count
        if self.unpinned is not None:
            self.unpinned.launched()
        if self.lease is not None:
            await self.lease.launched()
        if self._reply.status >= 500:
            await self._refuse()
        if self._reply.status != 200 or self.lease is None:
            response = await copy(self._request, self._reply)
            if response.status == 200:  # in slots of llama-server's choice: it does not say more
                log_finished(self._request, self._plan.title, Reuse(), None)
            return response
        await self._learn()
        await self._thaw(self.lease)
        if self._reply.content_type == EVENT_STREAM:
            return await self._stream(self._reply)
        return await self._whole(self._reply)

    async def _refuse(self) -> None:
        """Raises InvalidRequest if the request failed because it has no prompt: a client would ask
        again after llama-server's 500."""
        if self.learning is not None:
            await asyncio.wait((self.learning,))
            error = None if self.learning.cancelled() else self.learning.exception()
            if isinstance(error, InvalidRequest):
                raise error

    async def _learn(self) -> None:
        """Wait until the prompt's tokens are known. Without them the turn is not recorded."""
        learning = self.learning
        if learning is None:
            return
        if not learning.done():
            await asyncio.wait((learning,))
        self.learning = None
        error = None if learning.cancelled() else learning.exception()
        if error is not None and self._reply is not None and self._reply.status == 200:
            log.warning("a chat's tokens are not known", exc_info=error)

    async def _thaw(self, lease: SlotLease) -> None:
        """Wait for the session that the request continues, which is thawed while it runs."""
        if self.use is not None:
            await self.use.thawed()
            lease.session = self.use.session or lease.session

    # --- the reply ------------------------------------------------------------------------

    async def _whole(self, reply: ClientResponse) -> web.StreamResponse:
        try:
            body = await body_of(reply)
        except Unavailable as error:
            self._engine.notice(error)
            raise
        if len(body) <= READ_INLINE_BYTES_MAX:
            body = self._look(body)
        else:
            body = await asyncio.to_thread(self._look, body)
        await self._record()
        headers = to_client(reply.headers)
        headers.popall("Content-Length", None)
        response = web.Response(body=body, status=reply.status, reason=reply.reason)
        response.headers.update(headers)
        response.headers[REUSE_HEADER] = self._reuse.header()
        if self._session:
            response.headers[SESSION_HEADER] = self._session
        return response

    def _look(self, body: bytes) -> bytes:
        self._watch.see(body)
        self._watch.stop = self._watch.stop or "eos"  # the reply is complete in any case
        body = without_token_ids(body) if self._plan.hides_ids else body
        return body if self._sees_slots else without_slot(body)

    async def _stream(self, reply: ClientResponse) -> web.StreamResponse:
        request = self._request
        response = head_of(reply, {REUSE_HEADER: self._reuse.header()})
        response.headers.popall("Content-Length", None)
        await response.prepare(request)  # send the head now: the client reads it while it waits
        with Backlog(request, response) as backlog:
            last = await self._pass_on(reply, backlog)
            # Before the end is sent: the client's next request may need this slot.
            await self._leave()
            await backlog.write(b"".join(last))
            await backlog.sent()
        await response.write_eof()
        return response

    async def _pass_on(self, reply: ClientResponse, backlog: Backlog) -> list[bytes]:
        """Send the events of a reply, and record its turn; returns the last ones, which are not
        sent yet."""
        last: list[bytes] = []
        try:
            while chunk := await read(reply, EVENT_BYTES_MAX):
                await backlog.write(self._take(chunk, last))
            last.append(self._splitter.rest())
            if not self._watch.is_over and not self._plan.hides_end:
                raise self._engine.failure(LOST)
            await self._record()
        except TowerdError as error:
            self._engine.notice(error)
            await self._keep()
            if isinstance(error, Unavailable):
                error = self._engine.failure(error.message)
            last = [error_event(self._request.path, error)]
        return last

    def _take(self, chunk: bytes, last: list[bytes]) -> bytes:
        """The events that may be sent now. Events from the reply's last part on are appended to
        `last`, to be sent after the turn is recorded."""
        watch = self._watch
        ready: list[bytes] = []
        for event in self._splitter.feed(chunk):
            if data := event_data(event):
                watch.see(data)
                if PROGRESS not in data:
                    self._note_start()
                if watch.failed or event.startswith(ERROR):
                    watch.failed = True
                    event = reshaped_event(self._request.path, data) or event
            if not self._sees_slots:
                event = without_slot(event)
            (last if watch.is_over else ready).append(event)
        return b"".join(ready)

    def _note_start(self) -> None:
        """The first part of the reply has arrived."""
        if not self._started:
            self._started = True
            if self.lease is not None:
                self.lease.answering()
            self._ttft_s = time.monotonic() - self._began
            self._request.app[METRICS].started(self._began)

    # --- the end --------------------------------------------------------------------------

    @property
    def _reuse(self) -> Reuse:
        reuse = self.lease.reuse if self.lease is not None else Reuse()
        return reuse if self.use is None else self.use.reuse(reuse)

    async def _record(self) -> None:
        """Make the turn durable, once, even if the client leaves in between. Raises StoreError."""
        if self.lease is None or self._watch.failed:
            return
        if self._recording is None:
            self._recording = asyncio.create_task(self._finish(self.lease))
        await asyncio.shield(self._recording)

    async def _finish(self, lease: SlotLease) -> None:
        await self._thaw(lease)
        watch = self._watch
        cache_n = watch.cache_n
        prompt_ms = watch.timings.prompt_ms if watch.timings is not None else None
        if self._prefill is not None:
            cache_n, prompt_ms = self._prefill.cache_n, self._prefill.prompt_ms
            if await self._prefill.was_misplaced():
                lease.ran_elsewhere()
        lease.calls_tools = watch.calls_tools
        if self._plan.chat is not None and watch.stop is not None:
            lease.answered = self._plan.chat.answered(watch.text)
        has_ids = self._plan.dialect is Dialect.NATIVE and not self._plan.hides_end
        leased = await lease.finished(
            reply_ids=watch.ids if has_ids else None,
            reply_text=watch.text,
            cache_n=cache_n if self._plan.compose else None,
            stop=watch.stop or "cancelled",
            prompt_ms=prompt_ms,
        )
        if leased is not None:
            self._session = await self._recorder.record(leased.turn, answered=leased.answered)
        if watch.stop is not None:
            self._count(lease.scope)
        log_finished(
            self._request,
            self._plan.title,
            self._reuse,
            watch.final_timings(),
            session=self._session,
            ttft_s=self._ttft_s,
            end="" if watch.stop is not None else "cut off",
        )

    def _count(self, scope: str) -> None:
        watch = self._watch
        timings = watch.final_timings()
        n_tokens = watch.n_prompt + max(watch.n_predicted - 1, 0)
        stop = watch.stop or "cancelled"
        finish = Finish(
            stop, "", tuple(watch.ids), n_tokens, timings, self._reuse, session=self._session
        )
        self._request.app[METRICS].finished(finish)
        self._request.app[RECENT].add(scope, finish, self._ttft_s)

    def _continues(self) -> bool:
        reply = self._reply
        return self.is_resumable and reply is not None and not reply.closed

    async def _drain(self) -> None:
        """The client has left, but llama-server continues: read the reply to its end."""
        assert self._reply is not None
        last: list[bytes] = []
        with self._request.app[LINK].unattended() as leaving:
            ending = asyncio.create_task(self._end_when(leaving))
            try:
                while chunk := await read(self._reply, EVENT_BYTES_MAX):
                    self._take(chunk, last)
            except Unavailable as error:
                self._engine.notice(error)
            finally:
                ending.cancel()
                await asyncio.wait((ending,))
        await self._abandon()

    async def _end_when(self, leaving: asyncio.Event) -> None:
        """Delete the stream at shutdown: closing the connection would not end it."""
        await leaving.wait()
        path = "/v1/stream?conv_id=" + quote(self.headers[CONVERSATION], safe="")
        link = self._request.app[LINK]
        with suppress(TowerdError):
            auth = self._engine.upstream.auth()
            (await link.request(self._engine, "DELETE", path, auth)).close()

    async def _abandon(self) -> None:
        """End the request at llama-server and record what was generated."""
        if self._reply is not None:
            self._reply.close()
        try:
            await self._keep()
        finally:
            await self._leave()

    async def _keep(self) -> None:
        """Record the partial reply, if there is any."""
        try:
            if self._watch.parts:
                await self._record()
        except TowerdError as error:
            log.error("a turn that was cut off was not recorded", extra={"error": str(error)})

    async def _leave(self) -> None:
        if self._reply is not None:
            self._reply.close()
        if self.learning is None or self.learning.done():
            await self._learn()
            await self._give_back()
        else:  # the slot's contents are known only then; the client does not wait for that
            self._request.app[LINK].later(self._give_back_learned(self.learning))

    async def _give_back_learned(self, learning: asyncio.Task[None]) -> None:
        with self._request.app[LINK].unattended() as leaving:
            ending = asyncio.create_task(leaving.wait())
            await asyncio.wait((learning, ending), return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
        learning.cancel()
        await self._learn()
        await self._give_back()

    async def _give_back(self) -> None:
        if self.lease is not None:
            await self.lease.__aexit__(None, None, None)
        if self.use is not None:
            self.use.leave()
