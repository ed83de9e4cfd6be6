"""BadLine: a line to a server that cuts, delays and corrupts what comes back."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

Fault: TypeAlias = Literal["", "cut", "flip", "slow", "refuse"]
_CHUNK_BYTES = 1 << 16
_SLOW_S = 0.02


class BadLine:
    """Forwards connections to a server; `fault` happens to some of what it answers."""

    def __init__(self, endpoint: str, listener: socket.socket, seed: int = 0) -> None:
        parts = urlsplit(endpoint)
        self._server = parts.hostname, parts.port
        self._listener = listener
        self._random = random.Random(seed)
        self.fault: Fault = ""
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.fault == "refuse":
                client.close()
                continue
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            for pump in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=pump, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                if is_answer and self.fault and self._random.random() < 0.5:
                    damaged = self._damaged(chunk)
                    sink.sendall(damaged)
                    if self.fault == "cut":
                        break
                else:
                    sink.sendall(chunk)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _damaged(self, chunk: bytes) -> bytes:
        at = self._random.randrange(len(chunk))
        if self.fault == "cut":
            return chunk[:at]
        if self.fault == "slow":
            time.sleep(_SLOW_S)
        if self.fault == "flip":
            return chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1 :]
        return chunk


@contextmanager
def bad_line(endpoint: str) -> Iterator[BadLine]:
    """One to the server at this URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield BadLine(endpoint, listener)
