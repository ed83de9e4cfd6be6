"""Passing a stream on: nothing is lost, doubled or let past, in C++ as in Python."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.kernels import dispatch
from towerd.kernels.relay import Marks, Relayed, relay

MARKS = Marks((b'"on"',), (b'"end"', b'"error"'))
PLAIN = b'data: {"on":1}\n\n'
PIECES = (
    PLAIN, b'data: {"on":"' + b"x" * 200 + b'"}\n\n', PLAIN * 3, b'data: {"end":1,"on":1}\n\n',
    b'data: {"\\"on\\"":1}\n\n', b": ping\n\n", b'data: {"on":1}\r\n\r\n', b'data: {"on":1}\n',
    b'data: {"on":1}', b"\n\n", b"\n", PLAIN + b"\n", PLAIN + b'data: {"error":"on"}\n\n',
)  # fmt: skip
ENDS = (b"", b"0\r\n\r\n", b"5", b"10;x=y\r\n" + PLAIN + b"\r\n", b"1g\r\nx", b"a\r\nabc\r\n")
BYTES_MAX = 150
forced = pytest.mark.parametrize("forced", ["", "reference"])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def may_pass(data: bytes) -> bool:
    """Told by other means than in the code under test."""
    if b"\r" in data or len(data) > BYTES_MAX:
        return False
    lines = data.split(b"\n")
    events = [b"\n".join(event) for event in _between_blank_lines(lines)]
    is_whole = lines[-1] == b"" and (len(lines) > 1 and lines[-2] == b"")
    return is_whole and all(
        b'"on"' in event and b'"end"' not in event and b'"error"' not in event for event in events
    )


def _between_blank_lines(lines: list[bytes]) -> list[list[bytes]]:
    """Without what the last blank line leaves; a blank line where an event should be is one."""
    found: list[list[bytes]] = [[]]
    for line in lines[:-1]:
        if line or not found[-1]:
            found[-1].append(line)
        else:
            found.append([])
    return found[:-1] if not found[-1] else found


@contextmanager
def ends(forced: str) -> Iterator[tuple[socket.socket, socket.socket, int, int, int, int]]:
    """What llama-server and the client hold, the descriptors, and one to cancel with."""
    server, up = socket.socketpair()
    down, client = socket.socketpair()
    cancel, stop = os.pipe()
    with server, up, down, client, pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.ENV, forced)
        up.setblocking(False)
        down.setblocking(False)
        try:
            yield server, client, up.fileno(), down.fileno(), cancel, stop
        finally:
            os.close(cancel)
            os.close(stop)


@contextmanager
def saying(server: socket.socket, raw: bytes) -> Iterator[None]:
    """While it is said, as far as it is taken."""

    def say() -> None:
        with suppress(OSError):
            server.sendall(raw)

    thread = threading.Thread(target=say)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def relaying(up: int, down: int, cancel: int, is_chunked: bool) -> Iterator[list[Relayed]]:
    """In a thread; what it found when it came back."""
    found: list[Relayed] = []
    thread = threading.Thread(
        target=lambda: found.append(relay(up, down, cancel, MARKS, 4096, is_chunked))
    )
    thread.start()
    yield found
    thread.join()


def received(client: socket.socket, n: int) -> bytes:
    client.settimeout(10.0)
    return client.recv(n, socket.MSG_WAITALL) if n else b""


def run(forced: str, raw: bytes, bytes_max: int, is_chunked: bool) -> tuple[Relayed, bytes]:
    """What is found of what had all arrived, and what the client got."""
    with ends(forced) as (server, client, up, down, cancel, _):
        server.sendall(raw)
        server.shutdown(socket.SHUT_WR)
        found = relay(up, down, cancel, MARKS, bytes_max, is_chunked)
        client.setblocking(False)
        try:
            got = client.recv(1 << 20)
        except BlockingIOError:
            got = b""
    return found, got


@forced
@settings(max_examples=200)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    end=st.sampled_from(ENDS),
    is_chunked=st.booleans(),
)
def test_the_first_that_may_not_pass_ends_it(
    forced: str, pieces: list[bytes], end: bytes, is_chunked: bool
) -> None:
    passing: list[bytes] = []
    for piece in pieces:
        if not may_pass(piece):
            break
        passing.append(piece)
    raw = b"".join(map(chunk, pieces)) + end
    found, got = run(forced, raw, BYTES_MAX, is_chunked)
    n_passed = len(b"".join(map(chunk, passing)))
    assert found == (b"".join(passing), b"", raw[n_passed:])
    assert got == (raw[:n_passed] if is_chunked else b"".join(passing))


@forced
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_however_it_arrives(forced: str, cuts: list[int]) -> None:
    """Chunks that come in pieces wait for their rest."""
    raw = chunk(PLAIN) * 20
    with ends(forced) as (server, client, up, down, cancel, _):
        with relaying(up, down, cancel, True) as found:
            left = raw + b"0\r\n"
            for cut in cuts:
                server.sendall(left[:cut])
                left = left[cut:]
            server.sendall(left)
        assert received(client, len(raw)) == raw
    assert found == [(PLAIN * 20, b"", b"0\r\n")]


@forced
def test_told_to_stop(forced: str) -> None:
    """It comes back with what has passed, and the beginning of what has not."""
    with ends(forced) as (server, client, up, down, cancel, stop):
        with relaying(up, down, cancel, False) as found:
            server.sendall(chunk(PLAIN) + b"7\r\nda")
            assert received(client, len(PLAIN)) == PLAIN
            os.write(stop, b".")
    assert found == [(PLAIN, b"", b"7\r\nda")]


@forced
def test_no_more_than_asked(forced: str) -> None:
    """Of a long stream, about as much as is to be looked at in one go; the rest can follow."""
    with ends(forced) as (server, client, up, down, cancel, _):
        with saying(server, chunk(PLAIN) * 2000):
            found = relay(up, down, cancel, MARKS, 1000, True)
        n = len(found.passed) // len(PLAIN)
        assert received(client, n * len(chunk(PLAIN))) == chunk(PLAIN) * n
    assert 1000 <= len(found.passed) <= 1000 + 16 * 1024
    assert found == (PLAIN * n, b"", chunk(PLAIN)[: len(found.rest)])


@forced
def test_a_client_that_takes_no_more(forced: str) -> None:
    """What it did not take comes back, as it is to be written."""
    with ends(forced) as (server, client, up, down, cancel, _):
        with saying(server, chunk(PLAIN) * 100_000):
            found = relay(up, down, cancel, MARKS, 1 << 30, True)
        raw = chunk(PLAIN) * (len(found.passed) // len(PLAIN))
        got = received(client, len(raw) - len(found.unsent))
    assert found.unsent
    assert got + found.unsent == raw


@forced
@pytest.mark.parametrize("which", ["client", "server"])
def test_an_end_that_is_gone(forced: str, which: str) -> None:
    with ends(forced) as (server, client, up, down, cancel, _):
        server.sendall(chunk(PLAIN))
        (client if which == "client" else server).close()
        found = relay(up, down, cancel, MARKS, 4096, True)
    assert found == (PLAIN, chunk(PLAIN) if which == "client" else b"", b"")
