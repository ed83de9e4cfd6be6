"""/cors-proxy: only the chat page may use it, only when it was asked for, and what comes back is inert."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from towerd.api.llama.mcp_proxy import open_socket

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]


@pytest.fixture
async def mcp() -> AsyncIterator[TestServer]:
    """A server that answers with what it got, sets a cookie, and redirects."""

    async def echo(request: web.Request) -> web.Response:
        seen = {name.lower(): value for name, value in request.headers.items()}
        body = (await request.read()).decode()
        reply = web.json_response({"method": request.method, "headers": seen, "body": body})
        reply.set_cookie("sid", "1")
        reply.headers["Mcp-Session-Id"] = "s1"
        return reply

    async def moved(_request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/echo")

    app = web.Application()
    app.router.add_route("*", "/echo", echo)
    app.router.add_route("*", "/moved", moved)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    yield server
    await server.close()


async def test_only_named_headers_cross(make_client: MakeClient, mcp: TestServer) -> None:
    client = await make_client(ui_mcp_proxy=True)
    own = str(client.make_url("")).rstrip("/")
    headers = {
        "Origin": own,
        "Sec-Fetch-Site": "same-origin",
        "Cookie": "a=b",
        "X-Api-Key": "secret",
        "Proxy-Authorization": "Basic secret",
        "x-llama-server-proxy-header-authorization": "Bearer explicit",
        "X-Llama-Server-Proxy-Header-Accept": "text/event-stream",
        "x-llama-server-proxy-header-host": "evil.example",
        "x-llama-server-proxy-header-content-length": "99999",
        "x-llama-server-proxy-header-content-type": "application/json",
    }
    query = {"url": str(mcp.make_url("/moved"))}
    async with client.post("/cors-proxy", params=query, headers=headers, data=b"{}") as reply:
        assert reply.status == 200
        seen = json.loads(await reply.read())
        assert reply.headers["Mcp-Session-Id"] == "s1"
        assert reply.headers["Content-Security-Policy"] == "sandbox"
        assert "Set-Cookie" not in reply.headers
    assert (seen["method"], seen["body"]) == ("POST", "{}")
    assert seen["headers"] == {
        "host": f"127.0.0.1:{mcp.port}",
        "connection": "close",
        "authorization": "Bearer explicit",
        "accept": "text/event-stream",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": "2",
    }
    async with client.get("/props") as reply:
        assert (await reply.json())["cors_proxy_enabled"] is True


@pytest.mark.parametrize(
    "foreign",
    [
        {"Origin": "https://chat.example"},
        {"Origin": "http://localhost:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=lambda foreign: "-".join(foreign.values()).replace("/", ""),
)
async def test_no_other_page(
    make_client: MakeClient, mcp: TestServer, foreign: dict[str, str]
) -> None:
    """Neither an allowed page nor one that loads it as a picture, without its origin."""
    client = await make_client(ui_mcp_proxy=True, cors_origins=("*",))
    query = {"url": str(mcp.make_url("/echo"))}
    async with client.get("/cors-proxy", params=query, headers=foreign) as reply:
        assert reply.status == 403


async def test_off_by_default(client: Client, mcp: TestServer) -> None:
    query = {"url": str(mcp.make_url("/echo"))}
    for ask in (client.get, client.post):
        async with ask("/cors-proxy", params=query) as reply:
            assert reply.status == 403
            assert (await reply.json())["error"]["type"] == "feature_disabled"


async def test_one_of_several_tenants(make_client: MakeClient, mcp: TestServer) -> None:
    """Who is not alone reaches nothing of this machine through it."""
    keys = (("ka", "ann"), ("kb", "bob"))
    client = await make_client(ui_mcp_proxy=True, api_keys=keys)
    query = {"url": str(mcp.make_url("/echo"))}
    for key, status in (("ka", 403), ("none", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        async with client.get("/cors-proxy", params=query, headers=headers) as reply:
            assert reply.status == status


@pytest.mark.parametrize(
    "url",
    ["", "file:///etc/passwd", "http://", "http://a:b@127.0.0.1/", "http://[", "http://h:99999/"],
)
async def test_bad_targets(make_client: MakeClient, url: str) -> None:
    client = await make_client(ui_mcp_proxy=True)
    async with client.get("/cors-proxy", params={"url": url}) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "224.0.0.1"]
)
async def test_secrets_of_clouds(make_client: MakeClient, address: str) -> None:
    """Addresses of a cloud's metadata are not asked, whatever name leads there."""
    host = f"[{address}]" if ":" in address else address
    client = await make_client(ui_mcp_proxy=True)
    async with client.get("/cors-proxy", params={"url": f"http://{host}/"}) as reply:
        assert reply.status == 500
    info: Any = (10 if ":" in address else 2, 1, 6, "", (address, 80))
    with pytest.raises(OSError, match="not proxied"):
        open_socket(info)


async def test_nobody_there(make_client: MakeClient, unused_tcp_port: int) -> None:
    client = await make_client(ui_mcp_proxy=True)
    query = {"url": f"http://127.0.0.1:{unused_tcp_port}/"}
    async with client.get("/cors-proxy", params=query) as reply:
        assert reply.status == 500
        assert "got no answer from 127.0.0.1" in (await reply.json())["error"]["message"]
