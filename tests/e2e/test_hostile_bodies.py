"""Bodies that attack: nothing is done for one before its key, path and length are known, and little
after."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from daemon import Daemon

from towerd.models.bundled import bundled_model

KEY = "a-key"
LIMIT = 4 << 20
BOMB = gzip.compress(b'{"prompt": "' + b"a" * (60 << 20) + b'"}', 9)
SMALL = json.dumps({"content": "a girl named Lily", "model": "tales"}).encode()
CPU_S_MAX = 0.4
"""What the event loop may spend on all of an attack; to unpack one of its bombs takes as much."""
FACES = ("embedded", "llama-server", "router")


@pytest.fixture(scope="module", params=FACES)
def face(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A daemon with a key, behind each of the programs that clients talk to."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tales.gguf").write_bytes(bundled_model().read_bytes())
    flags: dict[str, tuple[str, ...]] = {
        "embedded": (),
        "llama-server": ("--engine", "llama-server"),
        "router": ("--models-dir", str(folder)),
    }
    limit = ("--request-bytes-max", str(LIMIT))
    made = Daemon(
        tmp_path_factory.mktemp("d"), "--api-key", KEY, "-c", "512", *limit, *flags[request.param]
    )
    with made:
        yield made
        assert "Traceback" not in made.log, made.log


def connected(daemon: Daemon) -> socket.socket:
    host, port = daemon.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def head(method: str, path: str, *headers: str, key: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    lines += [f"Authorization: Bearer {key}"] if key else []
    return "\r\n".join([*lines, "", ""]).encode()


def reply_to(sock: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the next reply."""
    stream = sock.makefile("rb")
    status = int(stream.readline().split()[1])
    headers = {}
    while line := stream.readline().strip().decode():
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    body = stream.read(int(headers.get("content-length", 0)))
    return status, headers, json.loads(body) if body else None


def ask(daemon: Daemon, request: bytes) -> tuple[int, dict[str, str], Any]:
    with connected(daemon) as sock:
        sock.sendall(request)
        return reply_to(sock)


def packed(body: bytes, coding: str, path: str = "/tokenize", key: str = KEY) -> bytes:
    length = f"Content-Length: {len(body)}"
    return head("POST", path, f"Content-Encoding: {coding}", length, key=key) + body


def loop_s(daemon: Daemon) -> float:
    """CPU time of the event loop so far, which runs in the process's first thread."""
    threads = psutil.Process(daemon.pid).threads()
    return next(each.user_time + each.system_time for each in threads if each.id == daemon.pid)


def peak_bytes(daemon: Daemon) -> int:
    """The most memory that the process had so far."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.skipif(not psutil.LINUX, reason="times of threads are Linux's")
def test_strangers_cause_no_work(face: Daemon) -> None:
    """Without a key nothing is unpacked, whatever the path and method are."""
    began_s, before = loop_s(face), peak_bytes(face)
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BOMB), BOMB)
    for path in ("/completion", "/v1/chat/completions", "/nowhere", "/slots"):
        assert ask(face, packed(BOMB, "gzip", path, key=""))[0] == 401
        chunked = head("POST", path, "Content-Encoding: gzip", "Transfer-Encoding: chunked")
        assert ask(face, chunked + chunk)[0] == 401
    length = f"Content-Length: {len(BOMB)}"
    assert ask(face, head("GET", "/health", "Content-Encoding: gzip", length) + BOMB)[0] == 200
    assert loop_s(face) - began_s < CPU_S_MAX
    assert peak_bytes(face) - before < 32 << 20


@pytest.mark.skipif(not psutil.LINUX, reason="times of threads are Linux's")
def test_what_is_unpacked_is_bounded(face: Daemon) -> None:
    """A bomb with a key is unpacked up to the limit, and not on the event loop."""
    ask(face, packed(gzip.compress(SMALL), "gzip"))  # the model is loaded then
    began_s, before = loop_s(face), peak_bytes(face)
    deflated = zlib.compress(gzip.decompress(BOMB)[: 40 << 20], 9)
    for body, coding in (
        (BOMB, "gzip"),
        (deflated, "deflate"),
        (gzip.compress(b"") * 300_000, "gzip"),
    ):
        status, _, reply = ask(face, packed(body, coding))
        assert (status, reply["error"]["type"]) == (413, "invalid_request_error")
    assert loop_s(face) - began_s < CPU_S_MAX
    assert peak_bytes(face) - before < 64 << 20


def test_bodies_are_unpacked(face: Daemon) -> None:
    """gzip in one or several members, deflate with and without zlib's header; anything else is
    refused in the API's shape."""
    plain = ask(face, head("POST", "/tokenize", f"Content-Length: {len(SMALL)}", key=KEY) + SMALL)
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    members = gzip.compress(SMALL[:9]) + gzip.compress(b"") + gzip.compress(SMALL[9:])
    good = {
        "gzip": gzip.compress(SMALL),
        "x-gzip": members,
        "deflate": zlib.compress(SMALL),
        "Deflate": raw.compress(SMALL) + raw.flush(),
        "identity": SMALL,
    }
    assert plain[0] == 200
    assert plain[2]["tokens"]
    for coding, body in good.items():
        assert ask(face, packed(body, coding))[::2] == plain[::2], coding
    bad = {
        400: (("gzip", b"no gzip"), ("deflate", gzip.compress(SMALL)[:30]), ("gzip", members[:-9])),
        415: (("br", SMALL), ("gzip, gzip", gzip.compress(gzip.compress(SMALL)))),
    }
    for expected, bodies in bad.items():
        for coding, body in bodies:
            status, _, reply = ask(face, packed(body, coding))
            assert status == reply["error"]["code"] == expected, (coding, reply)


def test_who_is_told_to_send(face: Daemon) -> None:
    """With `Expect: 100-continue` only a client whose body is read gets the word to send it."""
    asks = ("Expect: 100-continue", f"Content-Length: {len(SMALL)}")
    too_long = ("Expect: 100-continue", f"Content-Length: {LIMIT + 1}")
    for refused, expected in (
        (head("POST", "/tokenize", *asks), {401}),
        (head("POST", "/health", *asks, key=KEY), {404, 405}),
        (head("POST", "/tokenize", *too_long, key=KEY), {413}),
    ):
        status, headers, _ = ask(face, refused)
        assert status in expected
        assert headers["connection"] == "close"
    with connected(face) as sock:
        sock.sendall(head("POST", "/tokenize", *asks, key=KEY))
        assert reply_to(sock)[0] == 100
        sock.sendall(SMALL)
        assert reply_to(sock)[0] == 200


def test_what_follows_a_refusal(face: Daemon) -> None:
    """A body that nobody reads is dropped within bounds, after the reply; behind a short one the
    connection goes on."""
    with connected(face) as sock:
        for _ in range(2):
            sock.sendall(head("POST", "/tokenize", f"Content-Length: {len(SMALL)}"))
            status, headers, _ = reply_to(sock)
            assert (status, headers.get("connection")) == (401, None)
            sock.sendall(SMALL)
    for length in ("Content-Length: 1000000000000", "Transfer-Encoding: chunked"):
        with connected(face) as sock:
            sock.sendall(head("POST", "/tokenize", length))
            status, headers, _ = reply_to(sock)
            assert (status, headers["connection"]) == (401, "close")
            assert sock.recv(1) == b""
            n_sent = 0
            piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            with suppress(ConnectionError):
                while n_sent < 256 << 20:
                    n_sent += sock.send(piece)
            assert n_sent < 64 << 20
