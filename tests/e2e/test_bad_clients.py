"""Clients that stop reading, leave in the middle, or are there when the daemon is told to go."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon
from waiting import until

MakeDaemon = Callable[..., Daemon]
LONG = {"temperature": 0, "ignore_eos": True, "stream": True}


@contextmanager
def raw_post(daemon: Daemon, body: Any, headers: str = "") -> Iterator[socket.socket]:
    """A POST to /completion over a socket that takes as little as the system allows."""
    data = json.dumps(body).encode()
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((host, int(port)))
        head = (
            f"POST /completion HTTP/1.1\r\nHost: {host}\r\n{headers}"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        sock.sendall(head.encode() + data)
        yield sock


def turns_of(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    """The turns of a session, empty while there is none."""
    reply = requests.get(f"{daemon.url}/towerd/v1/sessions/{name}", timeout=10)
    turns: list[dict[str, Any]] = reply.json()["turns"] if reply.status_code == 200 else []
    return turns


def test_client_that_stops_reading(daemon: Daemon) -> None:
    """Its stream is kept within bounds, and the others continue; when it leaves, all that was
    generated is stored."""
    body = {"prompt": "A slow reader", "n_predict": 480, "n_probs": 50, **LONG}
    with raw_post(daemon, body, "X-Towerd-Session: slow-reader\r\n") as sock:
        assert sock.recv(16)
        for _ in range(3):
            assert daemon.complete("The others go on", 100)["tokens_predicted"] == 100
        assert daemon.get("/health") == {"status": "ok"}
    until(lambda: bool(turns_of(daemon, "slow-reader")))
    until(lambda: daemon.n_processing() == 0)
    (turn,) = turns_of(daemon, "slow-reader")
    assert turn["n_reply"] > 0


def test_client_that_leaves_during_its_prompt(make_daemon: MakeDaemon, slow_model: Path) -> None:
    """The prompt is dropped at once; what was evaluated of it may be used by the next."""
    ids = [7 + i % 300 for i in range(6000)]
    flags = ("-m", str(slow_model), "--ctx-size", "8192", "--live-tokens", "16384")
    with make_daemon(*flags, "--batch-size", "64") as daemon:
        with raw_post(daemon, {"prompt": ids, "n_predict": 50, **LONG}):
            until(lambda: processed(daemon) > 0)
        n_seen = processed(daemon)
        until(lambda: daemon.n_processing() == 0)
        assert n_seen < len(ids), "it was evaluated to its end before the client left"
        assert daemon.complete(ids[:200], 1)["timings"]["cache_n"] > 0
        assert daemon.stop() == 0
    with daemon.stored() as store:
        assert all(session.n_tokens < len(ids) for session in store.sessions())


def processed(daemon: Daemon) -> int:
    """Prompt tokens evaluated by the running request."""
    slots = daemon.get("/slots")
    return max((slot.get("n_prompt_tokens_processed", 0) for slot in slots), default=0)


def test_body_that_never_ends(daemon: Daemon) -> None:
    """A body that stops arriving blocks no other request, and leaving in its middle harms
    nothing."""
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert daemon.complete("Meanwhile", 1)["stop"]
    assert daemon.complete("Afterwards", 1)["stop"]
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\0" * 5000])
def test_no_http_at_all(daemon: Daemon, garbage: bytes) -> None:
    """A TLS hello, half a request, zeros: refused, and no other client notices."""
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    assert daemon.get("/health") == {"status": "ok"}
    assert "Traceback" not in daemon.log


def test_sigterm_during_streams(make_daemon: MakeDaemon, slow_model: Path) -> None:
    """Streams that do not end by themselves get a proper end when their time is up, the tokens
    so far are stored, the exit is 0."""
    flags = ("-m", str(slow_model), "--ctx-size", "32768", "--live-tokens", "65536")
    shared: dict[str, Any] = {"n_predict": 32000, **LONG}
    native = shared | {"prompt": [1, 2, 3, 4, 5]}
    chat = shared | {"messages": [{"role": "user", "content": "For ever."}]}
    with make_daemon(*flags) as daemon:
        streams = [
            Stream(daemon, "/completion", native, "native"),
            Stream(daemon, "/v1/chat/completions", chat, "chat"),
        ]
        for stream in streams:
            until(lambda stream=stream: len(stream.events) >= 10)  # type: ignore[misc]
        daemon.signal(signal.SIGTERM)
        for stream in streams:
            stream.join()
        assert daemon.wait() == 0, daemon.log
    assert "Traceback" not in daemon.log
    assert json.loads(streams[0].events[-1])["stop"] is True
    assert streams[1].events[-1] == "[DONE]"
    with daemon.stored() as store:
        for name in ("native", "chat"):
            (turn,) = store.turns(name)
            assert not turn.finished
            assert 8 <= turn.n_reply < 32000
        streamed = [i for event in streams[0].events for i in json.loads(event)["tokens"]]
        assert store.session_ids("native").tolist() == native["prompt"] + streamed


class Stream(threading.Thread):
    """Reads a stream to its end in a thread of its own; `events` is what came so far."""

    def __init__(self, daemon: Daemon, path: str, body: Any, session: str) -> None:
        super().__init__()
        self.events: list[str] = []
        self._url = daemon.url + path
        self._body = body
        self._headers = {"X-Towerd-Session": session}
        self.start()

    def run(self) -> None:
        with requests.post(
            self._url, json=self._body, headers=self._headers, stream=True, timeout=60
        ) as reply:
            for line in reply.iter_lines():
                if line:
                    self.events.append(line.decode().removeprefix("data: "))


def test_sigterm_lets_short_replies_finish(make_daemon: MakeDaemon) -> None:
    """A reply that needs a moment more gets it; new requests are refused."""
    with make_daemon() as daemon:
        replies: list[dict[str, Any]] = []
        ask = threading.Thread(target=lambda: replies.append(daemon.complete("Quick", 100)))
        ask.start()
        until(lambda: daemon.n_processing() == 1 or bool(replies))
        daemon.signal(signal.SIGTERM)
        ask.join()
        assert daemon.wait() == 0
    assert replies[0]["tokens_predicted"] == 100
    assert replies[0]["stop_type"] == "limit"
    with daemon.stored() as store:
        assert store.sessions()[0].n_tokens == 100 + replies[0]["tokens_evaluated"]
