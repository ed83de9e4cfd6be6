"""RoutedRequest: one request in the process of its model, from waiting for it to the end of its reply."""

from __future__ import annotations

import asyncio
import time

from aiohttp import ClientResponse, web

from towerd.api.http.access import is_owner_socket
from towerd.api.http.arrival import ARRIVED, WAITED
from towerd.api.http.keep_alive import STAYS, generates
from towerd.api.http.keys import TENANT
from towerd.api.http.tenants import caller_name
from towerd.api.relay.headers import to_towerd
from towerd.api.relay.relay import read
from towerd.engine.llama_server.process.client import Lost, NotHttp, Unreachable
from towerd.errors import TowerdError
from towerd.router.loading.model import RoutedModel
from towerd.router.loading.models import Models

REFUSED_S_MAX = 30.0
"""A process that accepts no connection for so long is given up."""
READING = ("GET", "HEAD")
"""Methods that change nothing, and load no model."""


class RoutedRequest:
    """`open` once, then read `reply`, then `close`."""

    def __init__(
        self,
        models: Models,
        model: RoutedModel,
        request: web.Request,
        body: bytes,
        *,
        is_use: bool = True,
        may_load: bool = True,
    ) -> None:
        """is_use: a client wants this model; what only reads never counts as that. may_load: as for
        `Models.enter`, for what is no use."""
        caller = caller_name(request[TENANT], on_socket=is_owner_socket(request))
        self.model = model
        self.reply: ClientResponse | None = None
        self.is_stopped = False
        """Whether its client ended the conversation while the model was loading."""
        self._models = models
        self._method = request.method
        self._path = request.rel_url.raw_path_qs
        self._headers = to_towerd(request.headers, caller)
        self._arrived_s = request[ARRIVED]
        self._body = body or None
        self._is_use = is_use and request.method not in READING
        self._may_load = may_load or self._is_use
        self._generates, self._stays_s = generates(request), request.get(STAYS)
        self._number = model.keep_alive.begin()

    async def open(self) -> None:
        """Wait for the model and send the request; its head is in `reply` then. Raises TowerdError,
        and is closed then."""
        deadline_s, refusing = 0.0, None
        while True:
            process = await self._models.enter(
                self.model, is_use=self._is_use, may_load=self._may_load
            )
            self._headers[WAITED] = f"{time.monotonic() - self._arrived_s:.6f}"
            try:
                reply = await process.send(self._method, self._path, self._headers, self._body)
            except (Lost, NotHttp) as error:
                self._leave()
                raise self.lost() from error
            except Unreachable as error:
                self._leave()
                if process is not refusing:
                    deadline_s, refusing = time.monotonic() + REFUSED_S_MAX, process
                if time.monotonic() > deadline_s:
                    self._models.give_up(self.model, process)
                    raise self.lost() from error
                await self._models.refused(self.model, process)
            except BaseException as error:
                if isinstance(
                    error, asyncio.CancelledError
                ):  # its client left while it was answered
                    self._keep_alive()
                self._leave()
                raise
            else:
                if reply.status != 503 or not self._models.is_leaving(self.model, process):
                    self.reply = reply
                    self._body = None  # a conversation remembers this request for long
                    if reply.status < 400:
                        self._keep_alive()
                    return
                reply.close()  # it had been told to end when the request arrived
                self._leave()
                await self._models.refused(self.model, process)

    def lost(self) -> TowerdError:
        """What a client gets whose model's process ended, or does not answer."""
        if self.model.silent:
            return self.model.unanswered()
        return TowerdError(
            f"The process of the model {self.model.name} ended while it answered; the next request "
            "loads the model again"
        )

    async def finish(self) -> None:
        """Read the rest of the reply, whose client has left."""
        try:
            while self.reply is not None and await read(self.reply):
                pass
        except Lost:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """The request has ended; at most once for each `open`."""
        if self.reply is not None:
            self.reply.close()
            self.reply = None
            self._leave()

    def _keep_alive(self) -> None:
        """The model stays loaded behind this request, which it has accepted, for as long as it says."""
        if self._generates:
            self.model.keep_alive.say(self._number, self._stays_s)

    def _leave(self) -> None:
        self._models.leave(self.model, is_use=self._is_use)
