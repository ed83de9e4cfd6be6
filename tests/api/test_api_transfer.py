"""Export and import over HTTP: whose sessions, and what is refused. Files are tested elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from scripted_model import make_scripted_model
from services import EmbeddedService
from tenants_talk import KEYS, Client, key, talk

from towerd.models.bundled import bundled_model

MakeClient = Callable[..., Awaitable[Client]]

IMPORT = "/towerd/v1/sessions/import"


async def export(client: Client, id: str, **headers: str) -> bytes:
    reply = await client.get(f"/towerd/v1/sessions/{id}/export", headers=headers)
    assert reply.status == 200, await reply.text()
    assert reply.content_type == "application/octet-stream"
    return await reply.read()


async def refusal(reply: Any, status: int) -> str:
    """The message of an error in llama-server's shape."""
    assert reply.status == status, await reply.text()
    error = (await reply.json())["error"]
    assert error["code"] == status
    return str(error["message"])


async def test_a_tenant_imports_for_itself(make_client: MakeClient) -> None:
    """Ann's file becomes Bob's session; neither can export the other's."""
    client = await make_client(api_keys=KEYS)
    id = await talk(client, **key("ka"))
    data = await export(client, id, **key("ka"))
    hidden = await client.get(f"/towerd/v1/sessions/{id}/export", headers=key("kb"))
    assert "no session" in await refusal(hidden, 404)
    for added in (1, 0):
        reply = await client.post(f"{IMPORT}?scope=ann", data=data, headers=key("kb"))
        assert reply.status == 200
        found = await reply.json()
        assert found["added"] == added
        assert found["bases"] == []
        assert (found["session"]["id"], found["session"]["scope"]) == (id, "bob")
    assert await export(client, id, **key("kb")) == data


async def test_the_owner_names_a_tenant(client: Client) -> None:
    """Without keys the caller is the owner: `local`, or any tenant but `public`."""
    id = await talk(client)
    data = await export(client, id)
    assert (await (await client.post(IMPORT, data=data)).json())["added"] == 0
    found = await (await client.post(f"{IMPORT}?scope=guest", data=data)).json()
    assert (found["added"], found["session"]["scope"]) == (1, "guest")
    ambiguous = await client.get(f"/towerd/v1/sessions/{id}/export")
    assert "guest, local" in await refusal(ambiguous, 400)
    assert "public" in await refusal(await client.post(f"{IMPORT}?scope=public", data=data), 400)


async def test_a_full_limit_of_the_disk(client: Client, service: EmbeddedService) -> None:
    """Turns and imports are refused before anything is evaluated; what is there is read and deleted."""
    id = await talk(client)
    data = await export(client, id)
    service.store.disk.bytes_max = 1 << 10
    n_evaluated = (await (await client.get("/metrics")).text()).split("prompt_tokens_total ")[-1]
    for path, body in (("/completion", b'{"prompt": "abcdef"}'), (IMPORT, data)):
        assert "--disk-max" in await refusal(await client.post(path, data=body), 507)
    told = await (await client.get("/metrics")).text()
    assert told.split("prompt_tokens_total ")[-1].split()[0] == n_evaluated.split()[0]
    assert await export(client, id) == data
    assert (await client.delete(f"/towerd/v1/sessions/{id}")).status == 200


async def test_bad_bodies(make_client: MakeClient) -> None:
    """Each is refused with one sentence, and nothing is stored."""
    client = await make_client(request_bytes_max=4096)
    for body, words in (
        (b"", "not a .tower file"),
        (b'{"prompt": "x"}', "not a .tower file"),
        (b"TWRS\x09" + bytes(60), "version 9"),
        (b"TWRS\x01" + bytes(60), "damaged"),
    ):
        assert words in await refusal(await client.post(IMPORT, data=body), 400)
    assert "4096" in await refusal(await client.post(IMPORT, data=bytes(4097)), 413)
    for path in ("sessions", "segments"):
        assert (await (await client.get(f"/towerd/v1/{path}")).json())[path] == []


async def test_without_the_vocabulary(make_client: MakeClient, tmp_path: Path) -> None:
    """Where the model's file is gone, or another model's, there are no files: 400 says why."""
    path = shutil.copy(bundled_model(), str(tmp_path / "served.gguf"))
    client = await make_client(model=Path(path))
    id = await talk(client)
    os.unlink(path)
    for words in (path, "but the served model has 512"):
        for reply in (
            await client.get(f"/towerd/v1/sessions/{id}/export"),
            await client.post(IMPORT, data=b"TWRS"),
        ):
            assert words in await refusal(reply, 400)
        make_scripted_model(Path(path), ["x"])


async def test_unknown_sessions(client: Client) -> None:
    assert "nobody" in await refusal(await client.get("/towerd/v1/sessions/nobody/export"), 404)


async def test_exports_do_not_stop_the_loop(client: Client, loop_time: Any) -> None:
    """Coding happens on a thread of its own."""
    id = await talk(client)

    async def once() -> None:
        data = await export(client, id)
        await client.post(f"{IMPORT}?scope=guest", data=data)

    await loop_time.watch(once)
