"""A bucket's requests end, whatever the server does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from waiting import until

from towerd.tiers.shared import bucket as module
from towerd.tiers.shared.bucket import Bucket, BucketError, ObjectDamaged, open_bucket

_ENTRY = (
    "<Contents><Key>sessions/x/{n}-{i}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    "<ETag>e</ETag><Size>1</Size></Contents>"
)


class Hostile(BaseHTTPRequestHandler):
    """An S3 server whose lists never end, whose objects are too large, and that answers a HEAD never."""

    protocol_version = "HTTP/1.1"
    per_page = 0
    asked = 0
    released: threading.Event

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        type(self).asked += 1
        self.released.wait()
        self.close_connection = True

    def do_GET(self) -> None:
        type(self).asked += 1
        if self.released.is_set():
            self.close_connection = True
        elif "list-type" in self.path:
            n = type(self).asked
            entries = "".join(_ENTRY.format(n=n, i=i) for i in range(self.per_page))
            page = f"<Name>b</Name><IsTruncated>true</IsTruncated><NextContinuationToken>{n}</NextContinuationToken>"
            self._answer(200, f"<ListBucketResult>{page}{entries}</ListBucketResult>")
        elif "page" in self.path:
            self._answer(403, "<html>\n<body>A secret of the owner's.</body></html>")
        else:
            self._answer(200, "x" * 1000)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("ETag", "e")
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[type[Hostile]]:
    """The handler of a server that runs; no request is left when the test ends."""

    class Own(Hostile):
        released = threading.Event()

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as http:
        http.daemon_threads = True
        Own.url = f"http://127.0.0.1:{http.server_port}"  # type: ignore[attr-defined]
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield Own
        Own.released.set()
        http.shutdown()
    until(lambda: not any(each.name == "towerd-bucket" for each in threading.enumerate()))


@pytest.fixture
def bucket(server: type[Hostile], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)  # type: ignore[attr-defined]
    for name, value in {
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "towerd",
        "AWS_SECRET_ACCESS_KEY": "of-no-use",
        "AWS_REGION": "nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    return open_bucket("s3://bucket/p")


def ended_by_close(bucket: Bucket, ask: Callable[[], object], server: type[Hostile]) -> str:
    """What a request that runs when the bucket is closed says."""
    said: list[str] = []

    def run() -> None:
        try:
            ask()
        except BucketError as error:
            said.append(error.message)

    asking = threading.Thread(target=run)
    asking.start()
    until(lambda: server.asked > 0)
    began = time.monotonic()
    bucket.close()
    asking.join(10)
    assert not asking.is_alive()
    assert time.monotonic() - began < 5
    return said[0]


def test_a_listing_has_an_end(bucket: Bucket, server: type[Hostile]) -> None:
    server.per_page = 1000
    with pytest.raises(BucketError, match="more than 10000 objects in sessions/x"):
        bucket.listing("sessions/x")
    assert server.asked <= 12


def test_a_listing_of_empty_pages(
    bucket: Bucket, server: type[Hostile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.5)
    monkeypatch.setattr(module, "UNANSWERED_MAX", 2)
    for _ in range(2):
        with pytest.raises(BucketError, match="cannot list a: no answer within"):
            bucket.listing("a")
    with pytest.raises(BucketError, match="did not answer what it was asked before"):
        bucket.get("a", 1)
    assert server.asked > 2


@pytest.mark.parametrize("kind", ["list", "head"])
def test_closing_ends_what_runs(bucket: Bucket, server: type[Hostile], kind: str) -> None:
    def ask() -> object:
        return bucket.listing("a") if kind == "list" else bucket.has("a")

    assert ended_by_close(bucket, ask, server).endswith(": the daemon stops.")
    with pytest.raises(BucketError, match="the daemon stops"):
        bucket.has("b")


def test_an_object_that_is_too_large_is_damaged(bucket: Bucket) -> None:
    with pytest.raises(ObjectDamaged, match="1000 bytes; up to 999"):
        bucket.get("a", 999)
    assert bucket.get("a", 1000) == b"x" * 1000


def test_what_a_server_sends_is_not_said(bucket: Bucket) -> None:
    with pytest.raises(BucketError) as caught:
        bucket.get("page", 1)
    assert "<" not in caught.value.message
    assert "secret" not in caught.value.message
