"""/cors-proxy: through which the chat page reaches MCP servers, whose answers a browser would not show it.

It is off unless it is asked for, and for that page alone: any other page could reach through it what only this
machine can. What comes back is inert: opened by itself it runs no script, and it sets no cookie.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import Any

from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
    hdrs,
    web,
)
from multidict import CIMultiDict
from yarl import URL

from towerd.api.http.access import require_overview
from towerd.api.http.body import read_bytes, release_body
from towerd.api.http.keys import CONFIG
from towerd.api.http.sse import write_or_stall
from towerd.errors import FeatureDisabled, Forbidden, InvalidRequest, TowerdError

log = logging.getLogger(__name__)

PREFIX = "x-llama-server-proxy-header-"
"""Of the headers that are passed on, without it; no others are."""
KEPT = frozenset(("content-type", "mcp-session-id", "mcp-protocol-version", "www-authenticate"))
"""Headers of the answer that the page gets."""
INERT = {"Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff"}
_NOT_SENT = frozenset(
    "host connection keep-alive te trailer transfer-encoding upgrade content-length expect "
    "accept-encoding".split()
)
_SECRETS = ("fd00:ec2::254", "100.100.100.200")
"""Addresses of the metadata of clouds that are not link-local."""
CONNECT_S_MAX = 10.0
SILENT_S_MAX = 600.0
"""As in llama-server."""
REDIRECTS_MAX = 5


async def forward(request: web.Request) -> web.StreamResponse:
    """Send the request to `?url=`, and what is answered back as it arrives."""
    if not request.app[CONFIG].ui_mcp_proxy:
        raise FeatureDisabled("this feature is disabled: start the server with --ui-mcp-proxy")
    if not _is_own_page(request):
        raise Forbidden("Only the chat page of this server may use its proxy")
    require_overview(request)
    target = _target(request.query.get("url", ""))
    data = await read_bytes(request) if request.method == "POST" else None
    headers = _headers(request)
    log.info("proxying a request of the chat page", extra={"host": target.host})
    async with _session() as session:
        try:
            reply = await session.request(
                request.method, target, headers=headers, data=data, max_redirects=REDIRECTS_MAX
            )
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            raise TowerdError(f"The proxy got no answer from {target.host}") from error
        finally:
            del data
            release_body(request)
        async with reply:
            return await _copy(request, reply)


def _is_own_page(request: web.Request) -> bool:
    """Whether no page of another origin makes the request. Browsers name the origin of every POST, and
    with each request its relation to this server."""
    headers = request.headers
    origin = headers.get(hdrs.ORIGIN)
    is_own = origin is None or origin.partition("://")[2] == headers.get(hdrs.HOST)
    return is_own and headers.get("Sec-Fetch-Site", "same-origin") == "same-origin"


def _target(text: str) -> URL:
    """Raises InvalidRequest."""
    try:
        target = URL(text)
        host, scheme, has_login = target.host, target.scheme, bool(target.user or target.password)
        assert target.port is None or target.port >= 0
    except (ValueError, AssertionError):
        raise InvalidRequest("invalid target URL") from None
    if scheme not in ("http", "https"):
        raise InvalidRequest(f"unsupported URL scheme in target URL: {scheme[:20]!r}")
    if not host:
        raise InvalidRequest("invalid target URL: missing host")
    if has_login:
        raise InvalidRequest("authentication in target URL is not supported")
    return target


def _headers(request: web.Request) -> CIMultiDict[str]:
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in request.headers.items():
        kept = name[len(PREFIX) :]
        if name.lower().startswith(PREFIX) and kept and kept.lower() not in _NOT_SENT:
            headers[kept] = value
    return headers


def _session() -> ClientSession:
    return ClientSession(
        connector=TCPConnector(force_close=True, socket_factory=open_socket),
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=SILENT_S_MAX),
        skip_auto_headers=(hdrs.USER_AGENT, hdrs.CONTENT_TYPE),
        headers={hdrs.ACCEPT_ENCODING: "identity"},
        trust_env=False,
    )


def open_socket(address: Any) -> socket.socket:
    """A socket for an address that a name was found to have. Raises OSError for one that is no server's,
    or that of a cloud's secrets."""
    family, kind, protocol, _, found = address
    number = ipaddress.ip_address(str(found[0]).partition("%")[0])
    number = getattr(number, "ipv4_mapped", None) or number
    if number.is_link_local or number.is_multicast or str(number) in _SECRETS:
        raise OSError("this address is not proxied")
    return socket.socket(family, kind, protocol)


async def _copy(request: web.Request, reply: ClientResponse) -> web.StreamResponse:
    kept = {name: value for name, value in reply.headers.items() if name.lower() in KEPT}
    response = web.StreamResponse(status=reply.status, headers=kept | INERT)
    await response.prepare(request)
    try:
        async for piece in reply.content.iter_any():
            await write_or_stall(request, response, piece)
    except (ClientError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()  # the page must not take a part for the whole
        return response
    await response.write_eof()
    return response
