"""Sessions of several tenants over HTTP."""

from __future__ import annotations

from aiohttp import web
from aiohttp.test_utils import TestClient

Client = TestClient[web.Request, web.Application]

KEYS = (("ka", "ann"), ("kb", "bob"))


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def talk(client: Client, **headers: str) -> str:
    """One turn; its session."""
    reply = await client.post(
        "/completion", json={"prompt": "abc", "n_predict": 3}, headers=headers
    )
    assert reply.status == 200
    return reply.headers["X-Towerd-Session"]
