"""The web UI's files through towerd: every byte and every header that llama-server alone sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import requests
from daemon import Daemon

from towerd.cli.bench.servers import llama_server as llama_server_alone
from towerd.models.bundled import bundled_model

FLAGS = ("-c", "512", "-np", "1", "-t", "1", "--no-warmup")
NAMES = (
    "index.html", "bundle.js", "style.css", "logo.svg", "icon.png", "manifest.webmanifest",
    "_app/immutable/chunks/a.js", "_app/version.json", "empty.css", "notes.txt",
)  # fmt: skip
OWN = frozenset(
    ("server", "connection", "keep-alive", "date", "vary", "access-control-allow-origin")
)
"""Headers of one connection, of the server itself, or about origins, which towerd judges."""


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files as a web UI has them, one of them of two megabytes."""
    root = tmp_path_factory.mktemp("public")
    rng = np.random.default_rng(0)
    for name in NAMES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        size = {"bundle.js": 2_000_000, "empty.css": 0}.get(name, 500)
        path.write_bytes(rng.integers(0, 256, size, np.uint8).tobytes())
    return root


@pytest.fixture(scope="module")
def both(
    llama_server: Path, public: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """URLs of llama-server alone and of towerd in front of one."""
    with llama_server_alone(bundled_model(), *FLAGS, "--path", str(public)) as server:
        flags = ("--engine", "llama-server", *FLAGS[:-1])
        root = tmp_path_factory.mktemp("files")
        with Daemon(root, *flags, "--", "--no-warmup", "--path", str(public)) as daemon:
            yield server.url, daemon.url


@pytest.fixture(scope="module")
def built_in(llama_server: Path, sidecar: Daemon, alone: str) -> tuple[str, str]:
    """The same of a llama-server that was built with its UI."""
    if requests.get(alone + "/", timeout=30).status_code != 200:
        pytest.skip("this llama-server was built without its web UI (LLAMA_BUILD_UI)")
    return alone, sidecar.url


def headers_of(reply: requests.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in reply.headers.items() if name.lower() not in OWN}


def check_same(
    both: tuple[str, str], path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> requests.Response:
    """The same status, headers and body from both; towerd's reply."""
    replies = []
    reply = requests.Response()
    for url in both:
        with requests.request(
            method, url + path, headers=headers, timeout=30, stream=True, allow_redirects=False
        ) as reply:
            body = reply.raw.read(decode_content=False)
            headers_got = headers_of(reply)
            if reply.status_code == 304:  # it describes the body that is not sent
                headers_got.pop("content-length", None)
            replies.append((reply.status_code, headers_got, body))
    assert replies[0] == replies[1]
    return reply


@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_files(both: tuple[str, str], public: Path, name: str, method: str) -> None:
    """Whole, with its type and length."""
    reply = check_same(both, "/" + name, method)
    assert reply.status_code == 200
    assert int(reply.headers["Content-Length"]) == (public / (name or "index.html")).stat().st_size


@pytest.mark.parametrize(
    "headers",
    [
        {"Range": "bytes=100-299"}, {"Range": "bytes=-50"}, {"Range": "bytes=9999999-"},
        {"Accept-Encoding": "gzip, br"}, {"Accept-Encoding": "identity"},
        {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"}, {"If-None-Match": "*"},
    ],
)  # fmt: skip
def test_parts_and_conditions(both: tuple[str, str], headers: dict[str, str]) -> None:
    """What a browser asks for when it has some of a file already."""
    check_same(both, "/bundle.js", headers=headers)


@pytest.mark.parametrize("path", ["/no.js", "/_app/none.js", "/index.html?v=1", "/%69con.png"])
def test_odd_paths(both: tuple[str, str], path: str) -> None:
    check_same(both, path)


@pytest.mark.parametrize("path", ["/", "/index.html", "/sw.js", "/manifest.webmanifest"])
@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_the_built_in_ui(built_in: tuple[str, str], path: str, encoding: str) -> None:
    """llama-server's own page, packed as it keeps it or unpacked."""
    check_same(built_in, path, headers={"Accept-Encoding": encoding})
