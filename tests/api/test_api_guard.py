"""Access: keys, tenants, origins, hosts, readiness."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession, UnixConnector, web
from aiohttp.test_utils import TestClient
from services import EmbeddedService

from towerd.api.http.keys import GATE
from towerd.api.http.tenants import OWNER, Tenants
from towerd.errors import Unauthorized

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]
KEYS = (("sk-ann", "ann"), ("sk-bob", "bob"))
SHORT = {"prompt": "abc", "n_predict": 3}


def test_keys_are_read_as_llama_server_does() -> None:
    """Authorization with or without Bearer, else X-Api-Key."""
    tenants = Tenants(KEYS)
    assert tenants.identify("Bearer sk-ann", "").scope == "ann"
    assert tenants.identify("sk-ann", "").scope == "ann"
    assert tenants.identify("", "sk-bob").scope == "bob"
    for authorization, key in (
        ("", ""),
        ("Bearer x", ""),
        ("Bearer x", "sk-ann"),
        ("é", ""),
        ("Bearer \udcff", ""),  # a byte that is no UTF-8, as aiohttp reads it
    ):
        with pytest.raises(Unauthorized):
            tenants.identify(authorization, key)
    assert Tenants(()).identify("", "") is OWNER
    assert not tenants.identify("sk-ann", "").admin


def test_who_sees_what_all_do() -> None:
    """A tenant that is the only one, and among several the one that a key without a name has."""
    alone = Tenants((("sk-ann", "ann"), ("sk-too", "ann")))
    assert alone.identify("sk-ann", "").sees_all
    several = Tenants((*KEYS, ("sk-monitor", "local")))
    seen = {key: several.identify(key, "") for key in ("sk-ann", "sk-bob", "sk-monitor")}
    assert [key for key, tenant in seen.items() if tenant.sees_all] == ["sk-monitor"]
    assert not any(tenant.admin for tenant in seen.values())
    assert OWNER.sees_all


async def test_key_required(make_client: MakeClient) -> None:
    """Everything but health and the page's files needs a key, which decides the scope."""
    client = await make_client(api_keys=KEYS)
    for path in ("/health", "/v1/health", "/towerd/", "/towerd/page/main.js"):
        async with client.get(path) as reply:
            assert reply.status == 200, path
    for path in ("/v1/models", "/models", "/props", "/slots", "/metrics", "/nope"):
        async with client.get(path) as reply:
            assert reply.status == 401, path
            assert await reply.json() == {
                "error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}
            }
    headers = {"Authorization": "Bearer sk-bob"}
    async with client.post("/completion", json=SHORT, headers=headers) as reply:
        assert reply.status == 200
    async with client.get("/towerd/v1/sessions", headers=headers) as reply:
        assert [each["scope"] for each in (await reply.json())["sessions"]] == ["bob"]


async def test_tenants_see_only_their_own(make_client: MakeClient) -> None:
    """Sessions and segments of another tenant do not exist."""
    client = await make_client(api_keys=KEYS)
    ann, bob = ({"X-Api-Key": key} for key, _ in KEYS)
    named = {"X-Towerd-Session": "diary"}
    async with client.post("/completion", json=SHORT, headers=ann | named) as reply:
        assert reply.status == 200
    async with client.get("/towerd/v1/segments", headers=ann) as reply:
        segment = (await reply.json())["segments"][0]["id"]
    for path in ("sessions/diary", f"segments/{segment}", f"trie?root={segment}"):
        async with client.get(f"/towerd/v1/{path}", headers=bob) as reply:
            assert reply.status == 404, path
        async with client.get(f"/towerd/v1/{path}", headers=ann) as reply:
            assert reply.status == 200, path
    for path in ("sessions", "segments"):
        async with client.get(f"/towerd/v1/{path}?scope=ann", headers=bob) as reply:
            assert (await reply.json())[path] == []
    async with client.delete("/towerd/v1/sessions/diary", headers=bob) as reply:
        assert reply.status == 404


async def test_tenants_see_no_uses_of_public_segments(make_client: MakeClient) -> None:
    """They are those of all. The operator's key sees them."""
    client = await make_client(api_keys=(*KEYS, ("sk-monitor", "local")))
    assert client.app is not None
    store = client.app[GATE].open().store
    ids = np.arange(300, 340, dtype=np.int32)
    (top,) = store.insert(ids, "public", [len(ids)])
    store.insert(np.append(ids, [7]).astype(np.int32), "bob", [len(ids) + 1])
    seen = {}
    for key in ("sk-ann", "sk-monitor"):
        headers = {"X-Api-Key": key}
        async with client.get("/towerd/v1/segments", headers=headers) as reply:
            (seen[key],) = (await reply.json())["segments"]
        path = f"/towerd/v1/segments/{seen[key]['id']}/why"
        async with client.get(path, headers=headers) as reply:
            assert reply.status == (403 if key == "sk-ann" else 200)
        async with client.get("/towerd/v1/trie?depth=1", headers=headers) as reply:
            assert (await reply.json())["truncated"] is False
        async with client.get("/towerd/v1/segments?sort=hits", headers=headers) as reply:
            assert [each["children"] for each in (await reply.json())["segments"]] == [0]
    assert (seen["sk-ann"]["hits"], seen["sk-ann"]["last_used"]) == (None, None)
    assert (seen["sk-monitor"]["hits"], seen["sk-monitor"]["last_used"]) == (
        top.hits,
        top.last_used,
    )


async def test_owner_only(make_client: MakeClient) -> None:
    """A tenant's key does not open what all tenants share."""
    client = await make_client(api_keys=KEYS)
    headers = {"X-Api-Key": "sk-ann"}
    for path in ("pins", "precache", "calibration", "verify", "gc"):
        async with client.post(f"/towerd/v1/{path}", json={}, headers=headers) as reply:
            assert reply.status == 403, path
            assert (await reply.json())["error"]["type"] == "permission_error"


async def test_unix_socket_is_the_owner(
    make_app: Callable[..., Awaitable[web.Application]], tmp_path: Path
) -> None:
    """Over the Unix socket no key is needed, and all is allowed."""
    runner = web.AppRunner(await make_app(api_keys=KEYS))
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        async with ClientSession(connector=UnixConnector(str(tmp_path / "s"))) as session:
            async with session.post("http://towerd/towerd/v1/gc", json={}) as reply:
                assert reply.status == 200
            async with session.get("http://towerd/v1/models") as reply:
                assert reply.status == 200
    finally:
        await runner.cleanup()


ORIGINS = [
    ("http://localhost:3000", True),
    ("http://127.0.0.1", True),
    ("http://[::1]:1", True),
    ("tauri://localhost", True),
    ("https://chat.example", True),
    ("https://evil.example", False),
    ("null", False),
    ("http://localhost.evil.example", False),
    ("http://[", False),
    ("http://127.0.0.1.evil.example", False),
    ("http://[::1]evil.example", False),
    ("http://localhost@evil.example", False),
    ("http://evil.example@localhost", False),
    ("http://localhost:evil", False),
    ("http://localhost/evil.example", False),
    ("localhost", False),
]


async def test_origins(make_client: MakeClient) -> None:
    """Web pages of other sites are refused; allowed ones get CORS headers, never credentials."""
    client = await make_client(cors_origins=("https://chat.example",))
    body = SHORT | {"stream": True}
    for origin, allowed in ORIGINS:
        async with client.post("/completion", json=body, headers={"Origin": origin}) as reply:
            await reply.read()
            assert reply.status == (200 if allowed else 403), origin
            assert reply.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
            assert reply.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in reply.headers


async def test_preflight(make_client: MakeClient) -> None:
    """A preflight needs no key and names what may be sent; to other pages it allows nothing."""
    client = await make_client(api_keys=KEYS)
    headers = {
        "Origin": "http://localhost:1",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    async with client.options("/v1/chat/completions", headers=headers) as reply:
        assert reply.status == 200
        assert reply.headers["Access-Control-Allow-Origin"] == "http://localhost:1"
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        assert "POST" in reply.headers["Access-Control-Allow-Methods"]
    headers["Origin"] = "http://evil.example"
    async with client.options("/v1/chat/completions", headers=headers) as reply:
        assert reply.status == 200
        assert not [name for name in reply.headers if name.startswith("Access-Control")]


async def test_what_pages_may_do(make_client: MakeClient) -> None:
    """llama-server's flags for web pages say what a preflight allows."""
    client = await make_client(
        cors_origins=("*",), cors_methods="GET, POST", cors_headers="*", cors_credentials=True
    )
    headers = {"Origin": "https://any.example", "Access-Control-Request-Headers": "authorization"}
    async with client.options("/v1/chat/completions", headers=headers) as reply:
        assert reply.headers["Access-Control-Allow-Origin"] == "https://any.example"
        assert reply.headers["Access-Control-Allow-Methods"] == "GET, POST"
        assert reply.headers["Access-Control-Allow-Headers"] == "*"
        assert reply.headers["Access-Control-Allow-Credentials"] == "true"


async def test_rebound_host(client: Client) -> None:
    """On loopback a foreign name in Host is DNS rebinding."""
    for host, status in (
        ("evil.example", 403),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:", 200),
        ("127.9.9.9:80", 200),
        ("[::1]", 200),
        ("[0:0:0:0:0:0:0:1]:65535", 200),
        ("[", 403),
        ("x\udcff", 403),
        ("[::1]evil.example", 403),
        ("evil.example[::1]", 403),
        ("[::1%evil]", 403),
        ("[127.0.0.1]", 403),
        ("localhost:evil", 403),
        ("localhost:80@evil.example", 403),
        ("evil.example@localhost", 403),
        ("localhost/evil.example", 403),
        ("localhost evil", 403),
        ("localhost.", 403),
        ("localhost.evil.example", 403),
        ("127.1", 403),
        ("0x7f000001", 403),
        ("2130706433", 403),
        ("0.0.0.0", 403),
        ("", 403),
    ):
        async with client.get("/health", headers={"Host": host}) as reply:
            assert reply.status == status, host


async def test_loading_and_leaving(client: Client, service: EmbeddedService) -> None:
    """Before the model is there, and at the end, all but the page is 503."""
    assert client.app is not None
    gate = client.app[GATE]
    gate.service = None
    for path in ("/health", "/v1/models", "/nope"):
        async with client.get(path) as reply:
            assert reply.status == 503
            assert await reply.json() == {
                "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
            }
    async with client.get("/towerd/") as reply:
        assert reply.status == 200
    gate.service, gate.closing = service, True
    async with client.get("/health") as reply:
        assert reply.status == 503
