"""Middleware of every request: accounting, errors, the guard, readiness, the API key and waking."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from towerd.api.http.access import is_owner_socket
from towerd.api.http.arrival import note_arrival
from towerd.api.http.body import release_body
from towerd.api.http.keep_alive import STAYS, generates
from towerd.api.http.keys import CONFIG, GATE, REQUESTS, TENANT, TENANTS, UI
from towerd.api.http.reply import error_reply, from_http
from towerd.api.http.request_log import LOGGED, log_refused
from towerd.api.http.tenants import CALLER, OWNER, Tenant
from towerd.errors import (
    Forbidden,
    NotSupported,
    TowerdError,
    Unauthorized,
    Unavailable,
    unforeseen,
)
from towerd.settings.addresses import host_of, is_loopback

log = logging.getLogger(__name__)

PAGE_PREFIX = "/towerd/page/"
UI_PREFIX = "/_app/"
UI_SUFFIXES = (
    ".html",
    ".js",
    ".css",
    ".svg",
    ".png",
    ".ico",
    ".webmanifest",
    ".woff",
    ".woff2",
    ".map",
    "/version.json",
    "/build.json",
)
NEVER_FILES = ("/towerd", "/v1/", "/responses/", "/conversations/")
"""What the names below these are is a client's choice: not a file of the web UI, however they end."""
QUIET_PATHS = frozenset(
    "/health /v1/health /props /models /v1/models /metrics /towerd/v1/stats "
    "/api/version /api/tags /api/ps".split()
)
"""What is read of these neither wakes a model nor keeps it from sleeping."""
READ_BY_POST = "/api/show"
"""A POST that only reads what is known of a model; as quiet as QUIET_PATHS."""
ALWAYS_REFUSED = ("/api/create", "/api/copy", "/api/delete", "/api/push")
BLOBS = "/api/blobs/"
"""What is always refused below it."""
HEADERS_EXPOSED = "X-Towerd-Reuse, X-Towerd-Session"


@web.middleware
async def account(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count every request by route and status, and turn every failure into an error reply."""
    status = 499
    note_arrival(request)
    try:
        response = await _answer(request, handler)
        status = response.status
        if status >= 400:
            log_refused(request, status)
        return response
    except web.HTTPRedirection as redirection:
        status = redirection.status
        raise
    finally:
        release_body(request)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        request.app[REQUESTS].requests.labels(route, str(status)).inc()


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TowerdError as error:
        if error.status >= 500 and not isinstance(error, NotSupported | Unavailable):
            path = request.rel_url.raw_path
            log.warning("request failed: %s %s: %s", request.method, path, error.message)
            request[LOGGED] = True
        log_refused(request, error.status, error.kind, error.public)
        return error_reply(error, path=request.path, in_full=is_owner_socket(request))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return error_reply(from_http(error), allowed, path=request.path)
    except ConnectionError:
        raise
    except Exception as error:
        log.exception("request failed: %s %s", request.method, request.rel_url.raw_path)
        request[LOGGED] = True
        hidden = unforeseen(error, "Internal error; see the daemon's log")
        return error_reply(hidden, path=request.path)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse web pages of other sites and DNS rebinding; answer preflights, which allow the others
    nothing."""
    is_checked = not is_owner_socket(request) and not request.app[CONFIG].behind_router
    if is_checked and not _host_allowed(request):
        raise Forbidden(f"Host {ascii(_host(request)[:100])} is not served here")
    if request.method == "OPTIONS":
        return _preflight(request)
    if is_checked and not origin_allowed(request):
        raise Forbidden("This web page may not call the API; allow its origin with --cors-origins")
    return await handler(request)


@web.middleware
async def ready(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 503 until the model is loaded and while the daemon shuts down."""
    if not is_served_always(request):
        request.app[GATE].check()
    return await handler(request)


def is_served_always(request: web.Request) -> bool:
    """Whether this is the status page, or a file of it or of the web UI that this process has."""
    return is_page(request.path) or request.path[1:] in request.app[UI]


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Set the tenant of the key on the request. Raises Unauthorized."""
    if request.app[CONFIG].behind_router:
        request[TENANT] = request.app[TENANTS].named(request.headers.get(CALLER, ""))
    elif is_owner_socket(request):
        request[TENANT] = OWNER
    elif is_ui_file(request):
        with suppress(Unauthorized):
            request[TENANT] = _identify(request)
    elif not is_public(request):
        request[TENANT] = _identify(request)
    return await handler(request)


@web.middleware
async def awake(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Load a model that sleeps, for a request that needs it, and keep it until that has ended."""
    gate = request.app[GATE]
    is_known = request.match_info.http_exception is None
    if _is_quiet(request):
        with gate.read():
            return await handler(request)
    if not is_known or TENANT not in request or is_served_always(request):
        return await handler(request)
    async with gate.used() as number:
        try:
            response = await handler(request)
        except (ConnectionError, asyncio.CancelledError):
            if request.content.is_eof():  # all of it had come when its client left
                _keep_alive(request, number)
            raise
        if response.status < 400:
            _keep_alive(request, number)
        return response


def _is_quiet(request: web.Request) -> bool:
    """Whether a request only reads what is known of a model that sleeps, or is refused whatever there is."""
    if request.method in ("GET", "HEAD"):
        is_read = request.path in QUIET_PATHS or is_health(request)
    else:
        is_read = request.path in (READ_BY_POST, *ALWAYS_REFUSED)
    return is_read or request.path.startswith(BLOBS)


def _keep_alive(request: web.Request, number: int) -> None:
    """The model stays loaded behind an accepted request for as long as that says."""
    if generates(request):
        request.app[GATE].keep_alive(number, request.get(STAYS))


def _identify(request: web.Request) -> Tenant:
    headers = request.headers
    return request.app[TENANTS].identify(
        headers.get("Authorization", ""), headers.get("X-Api-Key", "")
    )


def is_ui_file(request: web.Request) -> bool:
    """Whether this requests a file of llama.cpp's web UI, which needs no key: a browser loads it
    before the user can enter one. Its data comes from the API, which needs one."""
    if request.method not in ("GET", "HEAD"):
        return False
    if request.app[CONFIG].engine != "llama-server":
        return request.path[1:] in request.app[UI]
    path = request.path
    if path.startswith(NEVER_FILES):
        return False
    return path.startswith(UI_PREFIX) or path.endswith(UI_SUFFIXES)


def is_page(path: str) -> bool:
    """Whether this path is the status page or one of its files, which need no model."""
    return path in ("/", "/towerd", "/towerd/") or path.startswith(PAGE_PREFIX)


def is_health(request: web.Request) -> bool:
    """Whether this asks whether the server is alive, under one of its names."""
    vertex = request.app[CONFIG].vertex
    own = "" if vertex is None else vertex.health
    return request.path in ("/health", "/v1/health", own)


def is_public(request: web.Request) -> bool:
    """Whether this needs no key: health, the status page and its files."""
    return is_health(request) or is_page(request.path)


def _host_allowed(request: web.Request) -> bool:
    """Whether the Host is ours. On loopback a foreign Host means DNS rebinding; on other addresses
    the key protects."""
    config = request.app[CONFIG]
    if not all(is_loopback(host) for host in config.hosts) or hdrs.HOST not in request.headers:
        return True  # a client of HTTP/1.0 need not say it; browsers always do
    name = host_of(_host(request))
    return name is not None and (is_loopback(name) or name in config.hosts)


def origin_allowed(request: web.Request) -> bool:
    """Whether the request's Origin, if it has one, is allowed: pages of this machine, the server's
    own, and those of --cors-origins."""
    origin = request.headers.get("Origin")
    if origin is None:
        return True
    allowed = request.app[CONFIG].cors_origins
    if "*" in allowed or origin in allowed:
        return True
    authority = origin.partition("://")[2]
    name = host_of(authority)
    if name is None:
        return False
    return is_loopback(name) or name.endswith(".localhost") or authority == _host(request)


def _host(request: web.Request) -> str:
    """The Host header. aiohttp would ask the system for the machine's name where there is none,
    which may take seconds."""
    return request.headers.get(hdrs.HOST, "")


def _preflight(request: web.Request) -> web.Response:
    if not origin_allowed(request):
        return web.Response()
    config = request.app[CONFIG]
    headers = {"Access-Control-Allow-Methods": config.cors_methods, "Access-Control-Max-Age": "600"}
    asked = request.headers.get("Access-Control-Request-Headers")
    if allowed := config.cors_headers or asked:
        headers["Access-Control-Allow-Headers"] = allowed
    return web.Response(headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the server's name and the CORS headers to every response, including streamed ones."""
    response.headers["Server"] = "towerd"
    origin = request.headers.get("Origin")
    if origin is not None:
        response.headers["Vary"] = "Origin"
        if origin_allowed(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = HEADERS_EXPOSED
            if request.app[CONFIG].cors_credentials:
                response.headers["Access-Control-Allow-Credentials"] = "true"


MIDDLEWARES = (account, guard, ready, authenticate, awake)
