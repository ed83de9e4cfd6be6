"""Clients that close their side of the connection behind their request, as `nc -N` does, and those
that close all of it: the first read their reply, the others are gone."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon
from waiting import until

MakeDaemon = Callable[..., Daemon]
FIXED = {"n_predict": 40, "temperature": 0, "ignore_eos": True, "cache_prompt": False}


def connect(daemon: Daemon, *, unix: bool) -> socket.socket:
    if unix:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(daemon.socket))
        return sock
    host, port = daemon.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def request(body: Any, version: str = "1.1", path: str = "/completion") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def text_of(reply: bytes) -> str:
    """What was generated, of a reply that was streamed or not."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head[:7] + head[8:16] == b"HTTP/1. 200 OK\r", head
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n") if b'"content"' in line]
    return "".join(json.loads(event)["content"] for event in events)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_a_half_closed_client_gets_its_reply(
    daemon: Daemon, unix: bool, stream: bool, version: str
) -> None:
    body = {"prompt": "Once upon a time", "stream": stream, **FIXED}
    expected = daemon.complete(body["prompt"], 40, cache_prompt=False)["content"]
    with connect(daemon, unix=unix) as sock:
        sock.sendall(request(body, version))
        sock.shutdown(socket.SHUT_WR)
        assert text_of(read_all(sock)) == expected


def test_every_request_before_the_close_is_answered(daemon: Daemon) -> None:
    """Two that were sent at once, and an error."""
    with connect(daemon, unix=False) as sock:
        body = {"prompt": "One", **FIXED}
        sock.sendall(request(body) + request({}) + request(body))
        sock.shutdown(socket.SHUT_WR)
        reply = read_all(sock)
    assert reply.count(b"HTTP/1.1 200 OK") == 2
    assert reply.count(b"HTTP/1.1 400 Bad Request") == 1


def test_a_body_that_ends_early(daemon: Daemon) -> None:
    """It is not waited for."""
    with connect(daemon, unix=False) as sock:
        sock.sendall(request({"prompt": "One", **FIXED})[:-5])
        sock.shutdown(socket.SHUT_WR)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert "ended early" in json.loads(body)["error"]["message"]


class Relay(threading.Thread):
    """Another program between client and server, as an ssh tunnel is: it passes on what it gets
    and each side's end by itself, and closes when it cannot pass something on."""

    def __init__(self, target: socket.socket) -> None:
        super().__init__()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._target = target
        self.start()

    def run(self) -> None:
        with self._listener, self._target as server:
            client, _ = self._listener.accept()
            with client:
                back = threading.Thread(target=self._copy, args=(server, client))
                back.start()
                self._copy(client, server)
                back.join()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_client_that_is_gone_is_noticed(make_daemon: MakeDaemon, slow_model: Path) -> None:
    """While its reply, which is not streamed, is generated: that ends, and what there is of it is
    kept."""
    flags = ("-m", str(slow_model), "--ctx-size", "32768", "--live-tokens", "65536")
    body = {"prompt": [1, 2, 3], **FIXED, "n_predict": 30_000}
    with make_daemon(*flags) as daemon:
        for way in ("tcp", "unix", "relayed"):
            named = f"\r\nX-Towerd-Session: {way}\r\n".encode()
            sock = connect(daemon, unix=way == "unix")
            if way == "relayed":
                sock = socket.create_connection(Relay(sock).address)
            with sock:
                sock.sendall(request(body).replace(b"\r\n", named, 1))
                until(lambda: daemon.n_processing() == 1)
            until(lambda: daemon.n_processing() == 0)
            session = f"{daemon.url}/towerd/v1/sessions/{way}"
            until(lambda url=session: requests.get(url, timeout=10).status_code == 200)  # type: ignore[misc]
            (turn,) = requests.get(session, timeout=10).json()["turns"]
            assert turn["n_reply"] < 30_000
            assert not turn["finished"]
