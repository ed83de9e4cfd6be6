"""llama.cpp's web UI at /: types, caching, compression, and the key."""

from __future__ import annotations

import gzip
import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from services import EmbeddedService
from tenants_talk import Client

from towerd.api.admin.page import ui_files
from towerd.app.daemon import build_app
from towerd.settings.config import Config, with_server_args

ServeApp = Callable[..., Awaitable[Client]]
SCRIPT = b"let x = 1;" * 100
FILES = {
    "index.html": b"<!doctype html><title>chat</title>",
    "sw.js": b"// worker",
    "manifest.webmanifest": b"{}",
    "_app/immutable/bundle.abc.js": SCRIPT,
    "_app/immutable/bundle.abc.js.gz": gzip.compress(SCRIPT),
    "secret.txt": b"not of the page",
}


@pytest.fixture
def built(tmp_path: Path) -> dict[str, Path]:
    """A small UI, as `make ui` leaves one."""
    for name, data in FILES.items():
        path = tmp_path / "ui" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return ui_files(tmp_path / "ui")


async def test_files_of_the_ui(
    built: dict[str, Path], aiohttp_client: ServeApp, tmp_path: Path
) -> None:
    """Before the model is loaded and without a key; nothing beside them, and no way out."""
    config = Config(store_dir=tmp_path / "store", api_keys=(("k", "local"),), port=0)
    client = await aiohttp_client(build_app(config, ui=built), auto_decompress=False)
    for path, name in (("/", "index.html"), ("/index.html", "index.html"), ("/sw.js", "sw.js")):
        reply = await client.get(path, headers={"Accept-Encoding": "identity"})
        assert (reply.status, await reply.read()) == (200, FILES[name])
        assert reply.content_type == mimetypes.guess_type(name)[0]
        assert reply.headers["Cache-Control"] == "no-cache"
    script = "/_app/immutable/bundle.abc.js"
    reply = await client.get(script, headers={"Accept-Encoding": "gzip"})
    assert reply.headers["Content-Encoding"] == "gzip"
    assert (gzip.decompress(await reply.read()), reply.content_type) == (SCRIPT, "text/javascript")
    assert "immutable" in reply.headers["Cache-Control"]
    tag = {"If-None-Match": reply.headers["ETag"], "Accept-Encoding": "gzip"}
    assert (await client.get(script, headers=tag)).status == 304
    for path in ("/secret.txt", "/nope.js", "/_app/..%2F..%2Fsecret.txt", "/%2e%2e/secret.txt"):
        assert (await client.get(path)).status in (401, 404, 503)
    assert (await client.post("/sw.js")).status in (401, 405, 503)
    assert (await client.get("/v1/models")).status in (401, 503)


async def test_properties_say_what_the_ui_is_to_know(
    built: dict[str, Path], client: Client, service: EmbeddedService, aiohttp_client: ServeApp
) -> None:
    """Whether it is there, and how it is configured."""
    props = await (await client.get("/props")).json()
    assert (props["ui"], props["ui_settings"]) == (False, {})
    config = with_server_args(service.config, ("--ui-config", '{"theme": "dark"}'))
    other = await aiohttp_client(build_app(config, service=service, ui=built))
    props = await (await other.get("/props")).json()
    assert (props["ui"], props["ui_settings"]) == (True, {"theme": "dark"})
