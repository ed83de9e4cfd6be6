"""Sockets between threads of a scheduler: what blocks lets others run, and a process that dies closes its own."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol
from unittest.mock import patch

from scheduler import Baton, Scheduler

from towerd.store.catalog.shared import messages

FIRST_FD = 1 << 20
"""Above those of real files."""


class ProcessDied(BaseException):
    """The process that this thread belongs to was killed."""


class ChannelOwner(Protocol):
    """A process that may die."""

    is_dead: bool


class ChannelSocket:
    """One end of a stream of bytes. What is sent has arrived at once; it is read in drawn pieces."""

    def __init__(self, channels: Channels) -> None:
        self.fd = channels.add(self)
        self.peer: ChannelSocket
        self.owner: ChannelOwner | None = None
        self.data = bytearray()
        self.handed: deque[int] = deque()
        """Descriptors that were sent."""
        self.has_ended = False
        """Nothing more arrives."""
        self.reader: Baton | None = None
        self.is_moved = False
        """Another process has it now."""
        self._channels = channels

    def _turn(self) -> None:
        """Others may run. Raises ProcessDied."""
        self._channels.scheduler.point()
        if self.owner is not None and self.owner.is_dead:
            raise ProcessDied

    def sendall(self, data: bytes) -> None:
        """Raises BrokenPipeError if the other end is closed."""
        self._turn()
        if self.has_ended or self.peer.has_ended:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.peer.arrive(data)

    def arrive(self, data: bytes, fd: int | None = None) -> None:
        """Bytes and a descriptor are there to be read."""
        self.data += data
        if fd is not None:
            self.handed.append(fd)
        self.wake()

    def wake(self) -> None:
        """Who reads looks again."""
        if self.reader is not None:
            self._channels.scheduler.wake(self.reader)

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes; 0: it has ended."""
        self.wait()
        n = min(len(view), len(self.data))
        if n > 1 and self._channels.rng.random() < 0.1:
            n = self._channels.rng.randint(1, n)
        view[:n] = self.data[:n]
        del self.data[:n]
        return n

    def wait(self) -> None:
        """Wait until something is there, or it has ended. Raises ProcessDied."""
        self._turn()
        while not self.data and not self.has_ended:
            self.reader = self._channels.scheduler.running
            try:
                self._channels.scheduler.block()
            finally:
                self.reader = None
            self._turn()

    def shutdown(self, _: int) -> None:
        """End both directions."""
        self._turn()
        self.end()

    def close(self) -> None:
        """End both directions, unless another process has it."""
        if not self.is_moved:
            self.end()

    def end(self) -> None:
        """Nothing arrives at either end any more but what was sent."""
        for each in (self, self.peer):
            each.has_ended = True
            each.wake()

    def fileno(self) -> int:
        return self.fd

    def detach(self) -> int:
        return self.fd


class Channels:
    """All sockets of a simulation."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self._numbers = count(FIRST_FD)
        self._by_fd: dict[int, ChannelSocket] = {}

    def add(self, made: ChannelSocket) -> int:
        """The descriptor of a new socket."""
        fd = next(self._numbers)
        self._by_fd[fd] = made
        return fd

    def pair(self) -> tuple[ChannelSocket, ChannelSocket]:
        """As `socket.socketpair`."""
        one, other = ChannelSocket(self), ChannelSocket(self)
        one.peer, other.peer = other, one
        return one, other

    def at(self, fileno: int) -> ChannelSocket:
        """As `socket.socket(fileno=...)`."""
        return self._by_fd[fileno]

    def send_fds(self, sock: Any, parts: list[bytes], fds: list[int]) -> None:
        """As `socket.send_fds`."""
        sock.sendall(b"")
        old, moved = self._by_fd[fds[0]], ChannelSocket(self)
        moved.peer, old.peer.peer = old.peer, moved
        moved.data, moved.has_ended, old.is_moved = old.data, old.has_ended, True
        sock.peer.arrive(b"".join(parts), moved.fd)

    def recv_fds(self, sock: Any, n_bytes: int, n_fds: int) -> tuple[bytes, list[int], int, None]:
        """As `socket.recv_fds`: the socket is then the reader's."""
        sock.wait()
        if not sock.data:
            return b"", [], 0, None
        data = bytes(sock.data[:n_bytes])
        del sock.data[:n_bytes]
        fd = sock.handed.popleft()
        self._by_fd[fd].owner = sock.owner
        return data, [fd], 0, None

    def close_of(self, owner: ChannelOwner) -> None:
        """A process has died."""
        for each in list(self._by_fd.values()):
            if each.owner is owner:
                each.end()


@contextmanager
def channels_on(channels: Channels) -> Iterator[None]:
    """What Python offers for pairs of sockets is the simulation's, inside the block."""
    with (
        patch.object(messages, "is_hung_up", lambda sock: sock.has_ended),
        patch.object(socket, "socketpair", channels.pair),
        patch.object(socket, "socket", lambda fileno: channels.at(fileno)),
        patch.object(socket, "send_fds", channels.send_fds),
        patch.object(socket, "recv_fds", channels.recv_fds),
    ):
        yield
