"""Whatever an upstream sends, and however it comes or ends: the client gets the same, or is told
what is wrong; whatever a client sends arrives there."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from daemon import Daemon
from fake_llama_server import Asked, Talk, answering, props
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from towerd.models.bundled import bundled_model

WAIT_S = 30.0
STALL_S = 1.0
PAUSE_S = 0.01
HEAD = (
    b"HTTP/1.1 200 Fine\r\nContent-Type: text/plain; charset=utf-8\r\nX-A: 1\r\nX-A: v\xc3\xa4\r\n"
)
EVENTS = HEAD.replace(b"text/plain", b"text/event-stream")
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = (
    HEAD + CHUNKED + b"3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nX-Late: 1\r\n\r\n"
    b"HTTP/1.1 500 Not asked for\r\n\r\n"
)


class Upstream:
    """What a request to `/odd` is answered with."""

    def __init__(self) -> None:
        self.talk: Talk = saying()

    def answer(self, asked: Asked) -> None:
        self.talk(asked)


def saying(*pieces: bytes) -> Talk:
    """Writes these pieces one by one, and ends."""

    def talk(asked: Asked) -> None:
        asked.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            asked.connection.sendall(piece)

    return talk


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(scope="module")
def attached(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A towerd that is attached to it."""
    root = tmp_path_factory.mktemp("odd")
    slots = root / "slots"
    slots.mkdir(mode=0o700)
    talks = {"/odd": upstream.answer}
    with answering(props("b99999-0123abc"), save_to=slots, talks=talks) as url:
        flags = ("--upstream", url, "--slot-dir", str(slots), "-m", str(bundled_model()))
        with Daemon(root / "d", *flags) as daemon:
            yield daemon
            assert daemon.stop() == 0, daemon.log


@contextmanager
def connected(daemon: Daemon, sent: bytes) -> Iterator[socket.socket]:
    """A client's socket on which this was sent."""
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
        sock.sendall(sent)
        yield sock


def ask(daemon: Daemon, method: str = "GET", path: str = "/odd") -> requests.Response:
    return requests.request(method, daemon.url + path, timeout=WAIT_S)


def error_of(reply: requests.Response) -> str:
    return str(reply.json()["error"]["message"])


# --- replies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "text", "body"),
    [
        ("GET", HEAD + b"Content-Length: 8\r\n\r\nabcdefgh", b"abcdefgh"),
        ("GET", WHOLE, b"abcdefgh"),
        ("GET", HEAD + b"Connection: close\r\n\r\nabcdefgh", b"abcdefgh"),
        ("POST", b"HTTP/1.1 100 Continue\r\nX-B: 1\r\n\r\n" + WHOLE, b"abcdefgh"),
        ("HEAD", HEAD + b"Content-Length: 8\r\n\r\n", b""),
        ("GET", HEAD + b"Content-Length: 0\r\n\r\n", b""),
        ("GET", HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnone", b"none"),
    ],
    ids=["length", "chunks", "end", "after 100", "head", "empty", "packed"],
)
def test_replies_wherever_they_are_cut(
    attached: Daemon, upstream: Upstream, method: str, text: bytes, body: bytes
) -> None:
    """However its bytes arrive, a reply is the same."""

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.integers(0, len(text)), max_size=4))
    def check(cuts: list[int]) -> None:
        ends = sorted(cuts)
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        upstream.talk = saying(*pieces)
        with requests.request(method, attached.url + "/odd", timeout=WAIT_S, stream=True) as reply:
            assert (reply.status_code, reply.reason) == (200, "Fine")
            assert reply.raw.read(decode_content=False) == body
            assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
            values = reply.raw.headers.getlist("X-A")
            assert [value.encode("latin-1") for value in values] == [b"1", b"v\xc3\xa4"]
            for name in ("Content-Length", "Content-Encoding"):
                assert (name in reply.headers) == (name.encode() in text)
            assert not {"X-Late", "X-B"} & set(reply.headers)

    check()


def test_no_content(attached: Daemon, upstream: Upstream) -> None:
    """A 204 has no body, whatever length its sender names."""
    upstream.talk = saying(b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\n")
    reply = ask(attached)
    assert (reply.status_code, reply.content) == (204, b"")


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n",
    ],
    ids=["another protocol", "endless head", "length", "upgrade"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_reply_that_is_no_http(
    attached: Daemon, upstream: Upstream, method: str, text: bytes
) -> None:
    """Its client hears so, and nothing of what came."""
    upstream.talk = saying(text)
    reply = ask(attached, method)
    assert (reply.status_code, error_of(reply)) == (500, "llama-server's reply is not valid HTTP")
    assert ask(attached, path="/health").status_code == 200


@pytest.mark.parametrize("text", [b"", b"HTTP/1.1 200 OK\r\nX:"], ids=["nothing", "half a head"])
def test_no_reply(attached: Daemon, upstream: Upstream, text: bytes) -> None:
    """An upstream that ends its connection is waited for until it is there again."""
    upstream.talk = saying(text)
    reply = ask(attached, "POST")
    assert reply.status_code == 503
    assert error_of(reply) == "llama-server ended while it answered; try again"
    until(lambda: ask(attached, path="/health").status_code == 200)


@pytest.mark.parametrize(
    "head", [b"Content-Length: 9\r\n\r\n", CHUNKED + b"6\r\n"], ids=["length", "chunked"]
)
def test_a_reply_that_breaks_off(attached: Daemon, upstream: Upstream, head: bytes) -> None:
    """What came is handed out, then it is said that more was to come: by an event where events
    are read, else by a connection that breaks off as well."""
    upstream.talk = saying(HEAD + head, b"abc", b"def")
    with requests.get(attached.url + "/odd", stream=True, timeout=WAIT_S) as reply:
        assert reply.raw.read(6) == b"abcdef"
        with pytest.raises(requests.exceptions.RequestException):
            list(reply.iter_content(1))
    until(lambda: ask(attached, path="/health").status_code == 200)
    upstream.talk = saying(EVENTS + CHUNKED, b"3\r\n:\n\n\r\n", b"6\r\n:")

    def is_told() -> bool:
        """Whether the server was there, and its end is told in an event."""
        *_, last = ask(attached).text.strip().split("\n\n")
        return "llama-server ended" in last and last.startswith("data: ")

    until(is_told)
    until(lambda: ask(attached, path="/health").status_code == 200)


def test_no_server_there(tmp_path: Path) -> None:
    """An upstream that has gone is a 503."""
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    with answering(props("b99999-0123abc"), save_to=slots) as url:
        flags = ("--upstream", url, "--slot-dir", str(slots), "-m", str(bundled_model()))
        daemon = Daemon(tmp_path / "d", *flags).start()
    with daemon:
        reply = ask(daemon, path="/v1/models")
        assert reply.status_code == 503
        assert error_of(reply) == "llama-server is not running at the moment; try again"
        assert daemon.stop() == 0


def test_a_reply_waits_for_its_reader(attached: Daemon, upstream: Upstream) -> None:
    """What is not read stays with its sender; in the end it is all there."""
    data = bytes(range(256)) * 800_000
    stopped: list[int] = []
    is_stopped = threading.Event()

    def talk(asked: Asked) -> None:
        asked.connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data))
        asked.connection.setblocking(False)
        n = 0
        while select.select([], [asked.connection], [], STALL_S)[1] and n < len(data):
            n += asked.connection.send(data[n : n + (1 << 18)])
        stopped.append(n)
        is_stopped.set()
        asked.connection.setblocking(True)
        asked.connection.sendall(data[n:])

    upstream.talk = talk
    with requests.get(attached.url + "/odd", stream=True, timeout=WAIT_S) as reply:
        assert is_stopped.wait(WAIT_S)
        assert stopped[0] < len(data) / 4
        assert reply.raw.read() == data


def test_who_leaves_ends_it(attached: Daemon, upstream: Upstream) -> None:
    """The sender of a stream learns that its reader has left."""
    is_left = threading.Event()

    def talk(asked: Asked) -> None:
        asked.connection.sendall(EVENTS + CHUNKED)
        try:
            while not select.select([asked.connection], [], [], PAUSE_S)[0]:
                asked.connection.sendall(b"3\r\n:\n\n\r\n")
        except ConnectionError:
            pass
        is_left.set()

    upstream.talk = talk
    with connected(attached, b"GET /odd HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
        while b":\n\n" not in sock.recv(1 << 16):
            pass
        assert not is_left.is_set()
    assert is_left.wait(WAIT_S)


# --- requests -----------------------------------------------------------------------------


def body_of(asked: Asked) -> bytes:
    """A request's body, taken out of its chunks."""
    if "Content-Length" in asked.headers:
        return asked.body.read(int(asked.headers["Content-Length"]))
    if "Transfer-Encoding" not in asked.headers:
        return b""
    parts = []
    while size := int(asked.body.readline(), 16):
        parts.append(asked.body.read(size))
        assert asked.body.readline() == b"\r\n"
    assert asked.body.readline() == b"\r\n"
    return b"".join(parts)


@pytest.mark.parametrize("size", [0, 1, 5000, 3_000_000])
@pytest.mark.parametrize("kind", ["length", "chunked"])
def test_requests_arrive(attached: Daemon, upstream: Upstream, size: int, kind: str) -> None:
    """As they were sent, however big and however given, and without a header of towerd's."""
    data = (b"0123456789abcde\n" * (size // 16 + 1))[:size]
    seen: list[tuple[Asked, bytes]] = []

    def talk(asked: Asked) -> None:
        seen.append((asked, body_of(asked)))
        asked.connection.sendall(HEAD + b"Content-Length: 4\r\n\r\ndone")

    upstream.talk = talk
    path = "/odd/%41%20b%2Fc;d=%C3%A4?e=%26+f&&g=%zz~'"
    head = (
        b"PUT %s HTTP/1.1\r\nHost: localhost\r\nX-Name: v\xc3\xa4\r\nX-Name: 2\r\n" % path.encode()
    )
    if kind == "length":
        sent = head + b"Content-Length: %d\r\n\r\n%s" % (size, data)
    else:
        pieces = [data[i : i + 65536] for i in range(0, size, 65536)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        sent = head + CHUNKED + chunks + b"0\r\n\r\n"
    with connected(attached, sent) as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 Fine\r\n")
    ((asked, body),) = seen
    assert (asked.path, body) == (path, data)
    assert [value.encode("latin-1") for value in asked.headers.get_all("X-Name", [])] == [
        b"v\xc3\xa4",
        b"2",
    ]
    names = {name.lower() for name in asked.headers}
    length = {"content-length"} if kind == "length" else {"transfer-encoding"}
    assert names - length == {"host", "x-name", "connection"}


def test_bytes_that_are_no_text(attached: Daemon, upstream: Upstream) -> None:
    """A path with such bytes goes nowhere: without them it would be another one, and perhaps one
    that clients may not name."""
    seen: list[str] = []
    upstream.talk = lambda asked: seen.append(asked.path)
    for path in (b"/o\xffdd", b"/odd/\xe4"):
        with connected(attached, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path) as sock:
            assert b" 400 " in sock.recv(1 << 16).partition(b"\r\n")[0]
    assert seen == []


def test_a_body_that_is_not_wanted(attached: Daemon, upstream: Upstream) -> None:
    """Whoever refuses it before it is all there is heard."""
    upstream.talk = saying(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
    sent = b"POST /odd HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc"
    with connected(attached, sent) as sock:
        reply = b""
        while not reply.endswith(b"no"):
            reply += sock.recv(1 << 16)
        assert reply.startswith(b"HTTP/1.1 413 Too Large\r\n")


@pytest.mark.parametrize("length", [b"Content-Length: 100\r\n\r\nabc", CHUNKED + b"3\r\nabc\r\n"])
def test_a_body_that_breaks_off(attached: Daemon, upstream: Upstream, length: bytes) -> None:
    """No whole request arrives of one that its client did not send."""
    arrived: list[bytes] = []
    is_begun, is_over = threading.Event(), threading.Event()

    def talk(asked: Asked) -> None:
        is_begun.set()
        try:
            arrived.append(asked.body.readline())
            arrived.append(asked.body.read())
        except ConnectionError:
            pass
        finally:
            is_over.set()

    upstream.talk = talk
    with connected(attached, b"POST /odd HTTP/1.1\r\nHost: localhost\r\n" + length):
        assert is_begun.wait(WAIT_S)
    assert is_over.wait(WAIT_S)
    assert not b"".join(arrived).endswith(b"0\r\n\r\n")
    until(lambda: ask(attached, path="/health").status_code == 200)
