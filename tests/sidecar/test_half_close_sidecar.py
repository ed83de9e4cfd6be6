"""A client that closes its side behind its request, in front of a llama-server."""

from __future__ import annotations

import json
import socket

import pytest
from daemon import Daemon


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_reply(sidecar: Daemon, stream: bool) -> None:
    """All of it, streamed or not."""
    body = {"prompt": "Once upon a time", "n_predict": 100, "stream": stream}
    body |= {"temperature": 0, "ignore_eos": True}
    expected = sidecar.post("/completion", body | {"stream": False})["content"]
    data = json.dumps(body)
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    host, port = sidecar.url.removeprefix("http://").split(":")
    reply = b""
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head.encode() + data.encode())
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(65536):
            reply += part
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    lines = [line.removeprefix(b"data: ") for line in reply.split(b"\n") if b'"content"' in line]
    assert "".join(json.loads(line)["content"] for line in lines) == expected
