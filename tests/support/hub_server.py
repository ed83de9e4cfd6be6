"""A server that speaks the Hugging Face Hub's API, as far as fetching models goes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40


@dataclass
class HubServer:
    """Repositories, what is wrong with them, and what was asked for."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """OWNER/REPO -> file -> content."""
    commit: str = COMMIT
    gated: set[str] = field(default_factory=set)
    """Repositories that only the right token opens."""
    token: str = "hf_" + "a" * 34
    cut_at: int | None = None
    """The connection of the next download ends after so many bytes."""
    is_down_when_cut: bool = False
    """Whether nothing is answered after that."""
    is_down: bool = False
    page: bytes | None = None
    """What is answered to everything, as by a network that wants one to log in."""
    spoils: bool = False
    """Whether a byte of each download is another one."""
    downloads: list[tuple[str, str]] = field(default_factory=list)
    """(file, Range header) of each."""


def oid(data: bytes) -> str:
    """The name of a large file."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A server on a free port, until the block ends."""
    hub = HubServer()

    class Handler(_Handler):
        server_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if (page := self.server_hub.page) is not None:
            self._reply(200, page)
        elif self.server_hub.is_down:
            self._reply(503, b"{}")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.*))?", path):
            self._api(found[1], found[2] or "")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[3])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._content(found[1], found[2])
        else:
            self._reply(404, b"{}")

    def _api(self, repo: str, rest: str) -> None:
        hub = self.server_hub
        if not self._may_read(repo):
            return
        if rest.startswith("tree/"):
            entries = [_entry(name, data) for name, data in hub.repos[repo].items()]
            self._reply(200, json.dumps(entries).encode())
        elif rest == "refs":
            branches = [{"name": "main", "ref": "refs/heads/main", "targetCommit": hub.commit}]
            self._reply(200, json.dumps({"branches": branches}).encode())
        else:
            self._reply(200, json.dumps({"id": repo, "sha": hub.commit}).encode())

    def _resolve(self, repo: str, name: str) -> None:
        hub = self.server_hub
        if not self._may_read(repo):
            return
        if name not in hub.repos[repo]:
            self._reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        data = hub.repos[repo][name]
        linked = {"X-Linked-Etag": f'"{oid(data)}"', "X-Linked-Size": str(len(data))}
        headers = {"X-Repo-Commit": hub.commit, "ETag": '"pointer"', **linked}
        # As with the real one, the content is on another host.
        cdn = hub.url.replace("127.0.0.1", "localhost")
        self._reply(302, b"", {"Location": f"{cdn}/cdn/{repo}/{name}", **headers})

    def _content(self, repo: str, name: str) -> None:
        hub = self.server_hub
        if "Authorization" in self.headers:  # as where links carry a signature instead
            self._reply(400, b"{}")
            return
        data = hub.repos[repo][name]
        asked = self.headers.get("Range", "")
        start = int(found[1]) if (found := re.fullmatch(r"bytes=(\d+)-", asked)) else 0
        if self.command == "GET":
            hub.downloads.append((name, asked))
        body = bytearray(data[start:])
        if hub.spoils:
            body[-1] ^= 1
        ranged = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        headers = {"ETag": f'"{oid(data)}"', "Accept-Ranges": "bytes", **ranged}
        self._reply(206 if start else 200, bytes(body), headers)

    def _may_read(self, repo: str) -> bool:
        hub = self.server_hub
        if repo not in hub.repos:
            self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return False
        if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return False
        return True

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        hub = self.server_hub
        if hub.cut_at is not None and len(body) > hub.cut_at:
            body, hub.cut_at = body[: hub.cut_at], None
            hub.is_down = hub.is_down_when_cut
            self.close_connection = True
        self.wfile.write(body)


def _entry(name: str, data: bytes) -> dict[str, object]:
    lfs = {"oid": oid(data), "size": len(data), "pointerSize": 130}
    return {"type": "file", "path": name, "size": len(data), "oid": "2" * 40, "lfs": lfs}
