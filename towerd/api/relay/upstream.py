"""Requests that are passed on to llama-server as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, cast

from aiohttp import ClientResponse, web

from towerd.api.http.keys import service_of
from towerd.engine.llama_server.process.client import LOST, Body, Lost, NotHttp, Unreachable
from towerd.errors import TowerdError

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.engine.llama_server.engine import LlamaServerEngine

_BAD_HTTP = "llama-server's reply is not valid HTTP"
_DOWN = "llama-server is not running at the moment; try again"


def llama_server_of(request: web.Request) -> LlamaServerEngine:
    """The engine behind the proxy; see `service_of`."""
    return cast("LlamaServerEngine", service_of(request).engine)


async def request(
    engine: LlamaServerEngine,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: Body = None,
) -> ClientResponse:
    """Send one request unchanged (`path` is quoted, with its query) and return when the reply's
    head is there. Raises Unavailable if llama-server is unavailable, TowerdError if its reply
    cannot be read, and the errors of iterating the body."""
    if not engine.is_running:
        raise engine.failure(_DOWN)
    try:
        return await engine.upstream.send(method, path, headers, body)
    except NotHttp as error:
        raise TowerdError(_BAD_HTTP) from error
    except (Lost, Unreachable) as error:
        failure = engine.failure(LOST if isinstance(error, Lost) else _DOWN)
        # llama-server closes the connection on a body that it refuses; it may still be well.
        if not isinstance(body, AsyncIterator):
            engine.notice(failure)
        raise failure from error
