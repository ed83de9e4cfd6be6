"""The web UI's files through towerd: every byte and every header that llama-server alone sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import requests
from daemon import Daemon

from towerd.cli.bench.harness.servers import llama_server as llama_server_alone
from towerd.models.bundled import bundled_model

FLAGS = ("-c", "512", "-np", "1", "-t", "1", "--no-warmup")
NAMES = (
    "index.html",
    "bundle.js",
    "style.css",
    "logo.svg",
    "icon.png",
    "manifest.webmanifest",
    "_app/immutable/chunks/a.js",
    "_app/version.json",
    "empty.css",
    "notes.txt",
)
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


def answer_of(
    url: str, method: str, headers: Mapping[str, str] | None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, and the body as it was sent."""
    with requests.request(
        method, url, headers=headers, timeout=30, stream=True, allow_redirects=False
    ) as reply:
        got = headers_of(reply)
        if reply.status_code == 304:  # it describes the body that is not sent
            got.pop("content-length", None)
        return reply.status_code, got, reply.raw.read(decode_content=False)


def check_same(
    both: tuple[str, str], path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str]]:
    """The same status, headers and body from both; status and headers."""
    alone, ours = (answer_of(url + path, method, headers) for url in both)
    assert ours == alone
    return ours[:2]


@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_files(both: tuple[str, str], public: Path, name: str, method: str) -> None:
    """Whole, with its type and length."""
    status, headers = check_same(both, "/" + name, method)
    assert status == 200
    assert int(headers["content-length"]) == (public / (name or "index.html")).stat().st_size


@pytest.mark.parametrize(
    "headers",
    [
        {"Range": "bytes=100-299"},
        {"Range": "bytes=-50"},
        {"Range": "bytes=9999999-"},
        {"Accept-Encoding": "gzip, br"},
        {"Accept-Encoding": "identity"},
        {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"},
        {"If-None-Match": "*"},
    ],
)
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
