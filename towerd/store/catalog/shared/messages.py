"""Messages between a catalog's broker and its clients: msgpack, each after its length.

A request is `[operation, argument...]`, its reply `[kind of error or None, result or text]`. Both
ends are processes of one daemon and one release, so the format has no versions.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any

import msgspec

from towerd.errors import DiskFull, ServedAlready, StoreError, StoreLocked, StoreVersion
from towerd.store.catalog.database import CatalogDamaged

ERRORS: dict[str, type[StoreError]] = {
    kind.__name__: kind
    for kind in (StoreError, StoreLocked, ServedAlready, StoreVersion, DiskFull, CatalogDamaged)
}
"""The errors of a catalog that keep their kind on the way."""

_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Channel:
    """One end of a connection. One thread at a time may send, and one receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError when the other end is gone."""
        data = _encode(message)
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next message, with lists for tuples. Raises EOFError when the other end is gone."""
        (n_bytes,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return _decode(self._read(n_bytes))

    def send_socket(self, sock: socket.socket) -> None:
        """Send a socket, which is closed here. Raises OSError when the other end is gone."""
        socket.send_fds(self._sock, [b"\0"], [sock.fileno()])
        sock.close()

    def receive_socket(self) -> socket.socket:
        """The socket that the other end sends next. Raises EOFError when it is gone."""
        _, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        if not fds:
            raise EOFError
        return socket.socket(fileno=fds[0])

    @property
    def is_hung_up(self) -> bool:
        """Whether the other end is gone. What it has sent last may not have been received yet."""
        return is_hung_up(self._sock)

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` gets EOFError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already
        self._sock.close()

    def _read(self, n_bytes: int) -> bytearray:
        data = bytearray(n_bytes)
        view, at = memoryview(data), 0
        while at < n_bytes:
            try:
                n = self._sock.recv_into(view[at:])
            except OSError:
                n = 0
            if not n:
                raise EOFError
            at += n
        return data


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other end of a socket is closed, whatever is there to be read."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


def result_of(channel: Channel, *message: Any) -> Any:
    """Send a request and return the result in its reply. Raises the error that it carries, and
    StoreError when the other end is gone."""
    try:
        channel.send(message)
        kind, result = channel.receive()
    except (EOFError, OSError) as error:
        raise broker_gone() from error
    if kind is not None:
        raise ERRORS[kind](result)
    return result


def broker_gone() -> StoreError:
    """The error for operations without a broker."""
    return StoreError("the process that has the catalog open is gone; start towerd again")


def error_to_wire(error: StoreError) -> list[Any]:
    """The reply that carries an error."""
    kind = next((each for each in ERRORS if type(error) is ERRORS[each]), "StoreError")
    return [kind, error.message]
