"""Sockets and pipes in memory: what is written arrives in drawn pieces at drawn moments, or not at all.

A `SimulatedTransport` is one end. What it was given to send is in its buffer until it has arrived; the first
bytes of that are the kernel's and arrive also when the end is closed, the rest is what asyncio buffers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

Address: TypeAlias = "tuple[str, int] | str"
"""Of TCP, or the path of a Unix socket."""
HIGH_BYTES = 64 * 1024
"""Where asyncio tells a writer to wait."""


class SocketOwner(Protocol):
    """A simulated process: its sockets close with it, and wait while it is stopped."""

    sockets: list[SimulatedTransport]
    servers: list[SimulatedServer]
    is_stopped: bool
    code: int | None


class SimulatedSocket:
    """What code asks of the socket under a transport."""

    def __init__(self, family: int, name: Address = "", peer: Address = "") -> None:
        self.family = family
        self.type = socket.SOCK_STREAM
        self.proto = 0
        self.name = name
        self.peer = peer
        self.error = 0
        """What SO_ERROR says once."""

    def getsockopt(self, level: int, option: int) -> int:
        if (level, option) != (socket.SOL_SOCKET, socket.SO_ERROR):
            return 0
        error, self.error = self.error, 0
        return error

    def setsockopt(self, *_: object) -> None:
        """All the same."""

    def setblocking(self, _: bool) -> None:
        """It never blocks."""

    def getsockname(self) -> Address:
        return self.name

    def getpeername(self) -> Address:
        return self.peer

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Its transport is closed."""


class SimulatedTransport(asyncio.Transport):
    """One end of a connection, or of a pipe."""

    def __init__(
        self,
        loop: SimulatedNetwork,
        owner: SocketOwner | None,
        chance: random.Random,
        sock: SimulatedSocket,
    ) -> None:
        super().__init__({"socket": sock, "sockname": sock.name, "peername": sock.peer})
        self.peer: SimulatedTransport
        self.protocol: asyncio.BaseProtocol | None = None
        """None until the other side has accepted, and once the connection is lost."""
        self.is_shut = False
        """Nothing that arrives is read any more."""
        self.owner = owner
        self._loop, self._chance, self._socket = loop, chance, sock
        self._out = bytearray()
        self._is_local = sock.family == socket.AF_UNIX
        """What the kernel took arrives, whatever happens to this end."""
        kernel = (4096, 1 << 16) if self._is_local else (1, 100, 4096, 1 << 16, 1 << 20)
        self._kernel_bytes = chance.choice(kernel)
        self._slowness = chance.choice((0.0, 1e-4, 1e-3, 0.02))
        self._piece_max = chance.choice((1 << 20, 4096, 64, 7))
        self._n_stalls = chance.choice((0, 0, 1, 3))
        self._high, self._low = HIGH_BYTES, HIGH_BYTES // 4
        self._delivery: asyncio.TimerHandle | None = None
        self._is_reading = True
        self._is_paused = False
        """The protocol was told to pause."""
        self._is_closing = False
        self._is_ending = False
        """The end follows what is to be sent."""
        self._has_ended = False
        self._heard_end = False
        self._is_broken = False
        """The other side has reset the connection, which was not noticed yet."""
        if owner is not None:
            owner.sockets.append(self)

    # ---- what a transport is asked --------------------------------------------------------------

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Connect this end to its protocol."""
        self.protocol = protocol
        protocol.connection_made(self)
        self.peer.pump()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing and not self._heard_end

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if self._is_closing or self._is_reading:
            return
        self._is_reading = True
        if self._heard_end:
            self._loop.call_soon(self._tell_end)  # as asyncio, which reads again
        elif self._is_broken:
            self._loop.call_soon(self._lose, ConnectionResetError(errno.ECONNRESET, "reset"))
        else:
            self.peer.pump()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return max(0, len(self._out) - self._kernel_bytes)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_ending and not self._is_closing:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._is_closing or not data or self._is_dead:
            return
        if self._is_broken:
            self._is_closing = True
            self._loop.call_soon(self._lose, BrokenPipeError(errno.EPIPE, "broken pipe"))
            return
        self._out += data
        self.pump()
        if self.get_write_buffer_size() > self._high and not self._is_paused:
            self._is_paused = True
            self.get_protocol().pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._is_closing and not self._is_ending:
            self._is_ending = True
            self.pump()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = self._is_ending = True
        if not self.get_write_buffer_size():
            self._loop.call_soon(self._lose, None)
        self.pump()

    def abort(self) -> None:
        """Close at once: of what is to be sent, some is lost."""
        self._cut_off()
        self._is_closing = True
        self._loop.call_soon(self._lose, None)

    # ---- what the network does ------------------------------------------------------------------

    @property
    def _is_dead(self) -> bool:
        """Whether this end's process has ended."""
        return self.owner is not None and self.owner.code is not None

    @property
    def takes_data(self) -> bool:
        """Whether what arrives is read now, or dropped."""
        if self.is_shut:
            return True
        is_running = self.owner is None or not self.owner.is_stopped
        return self.protocol is not None and self._is_reading and is_running

    def pump(self) -> None:
        """Have what is to be sent arrive."""
        has_more = self._out or (self._is_ending and not self._has_ended)
        if self._delivery is None and has_more and self.peer.takes_data:
            self._delivery = self._loop.call_later(self._delay(), self._deliver)

    def _delay(self) -> float:
        if self._n_stalls and self._chance.random() < 0.02:
            self._n_stalls -= 1
            return self._chance.uniform(0, 1.0)
        return self._slowness * self._chance.random()

    def _deliver(self) -> None:
        self._delivery = None
        is_running = self.owner is None or not self.owner.is_stopped
        if not self.peer.takes_data or not is_running:
            return  # it is pumped again when that changes
        if self._out:
            n = self._chance.randint(1, max(self._piece_max, len(self._out) // 8))
            data = bytes(self._out[:n])
            del self._out[:n]
            self.peer.receive(data)
        elif self._is_ending and not self._has_ended:
            self._has_ended = True
            self.peer.receive_end()
        if self._is_closing and not self.get_write_buffer_size():
            self._lose(None)
        if self._is_paused and self.get_write_buffer_size() <= self._low:
            self._is_paused = False
            if self.protocol is not None:
                self.protocol.resume_writing()
        self.pump()

    def receive(self, data: bytes) -> None:
        """Bytes arrive."""
        self._loop.n_bytes += len(data)
        if self.is_shut or self._is_closing:
            self._loop.call_later(self._delay(), self.peer.reset)
            return
        assert isinstance(self.protocol, asyncio.Protocol)
        self.protocol.data_received(data)

    def receive_end(self) -> None:
        """The other side sends nothing more."""
        if not self._is_closing and not self.is_shut:
            self._heard_end = True
            self._tell_end()

    def _tell_end(self) -> None:
        if self.protocol is None or self._is_closing:
            return
        hear: Callable[[], bool | None] | None = getattr(self.protocol, "eof_received", None)
        if hear is None or not hear():
            self.close()

    def reset(self) -> None:
        """The other side is closed, and does not take what was sent."""
        self._out.clear()
        self._has_ended = True
        if self.is_shut:
            return
        self._socket.error = errno.ECONNRESET
        if self.is_reading() or self._is_closing or self.get_write_buffer_size():
            self._lose(ConnectionResetError(errno.ECONNRESET, "connection reset by peer"))
        else:
            self._is_broken = True

    def _cut_off(self) -> None:
        """Lose what is to be sent, but for what the kernel may have sent already; then end or reset."""
        n_sent = min(len(self._out), self._kernel_bytes)
        del self._out[n_sent if self._is_local else self._chance.randint(0, n_sent) :]
        self._is_ending = True
        if not self._is_local and self._chance.random() < 0.5:
            self._out.clear()
            self._has_ended = True
            self._loop.call_later(self._delay(), self.peer.reset)
        self.pump()

    def die(self) -> None:
        """This end's process has ended."""
        if not self.is_shut:
            self._cut_off()
            self._is_closing = True
            self._lose(None)
        self.pump()

    def _lose(self, error: Exception | None) -> None:
        """Tell the protocol, once, that the connection is lost."""
        if self.is_shut:
            return
        self.is_shut = self._is_closing = self._is_ending = True
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connection_lost(error)
        self.pump()
        self.peer.pump()  # what arrives now is refused


class SimulatedServer(asyncio.AbstractServer):
    """Listens at one address."""

    def __init__(
        self, loop: SimulatedNetwork, address: Address, factory: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.sockets: tuple[SimulatedSocket, ...] = (SimulatedSocket(family, address),)
        self.address = address
        self.factory = factory
        self.owner = loop.owner()
        self._loop: SimulatedNetwork = loop

    def close(self) -> None:
        self._loop.listening.pop(self.address, None)
        self.sockets = ()

    def is_serving(self) -> bool:
        return bool(self.sockets)

    async def start_serving(self) -> None:
        """It does from the start."""

    async def serve_forever(self) -> None:
        """Serve until it is closed: a server has to have it, though none here is served so."""
        await self._loop.create_future()

    async def wait_closed(self) -> None:
        """Its connections are closed each for itself."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop


class SimulatedNetwork(asyncio.AbstractEventLoop):
    """The part of a loop that makes connections."""

    def __init__(self) -> None:
        self.listening: dict[Address, SimulatedServer] = {}
        self.n_bytes = 0
        """How many have arrived."""
        self._n_ports = 40_000

    @abstractmethod
    def owner(self) -> SocketOwner | None:
        """The simulated process that makes a socket now."""

    @abstractmethod
    def chance(self, label: str) -> random.Random:
        """See `SimulatedLoop`."""

    def pair(
        self, a: SimulatedSocket, b: SimulatedSocket, owner: SocketOwner | None
    ) -> tuple[SimulatedTransport, SimulatedTransport]:
        """Two ends that are connected: ours, and that of a process."""
        one = SimulatedTransport(self, self.owner(), self.chance("socket"), a)
        other = SimulatedTransport(self, owner, self.chance("socket"), b)
        one.peer, other.peer = other, one
        return one, other

    def pipe(self, owner: SocketOwner) -> tuple[SimulatedTransport, SimulatedTransport]:
        """A pipe to or from a process."""
        return self.pair(SimulatedSocket(socket.AF_UNIX), SimulatedSocket(socket.AF_UNIX), owner)

    def simulated_socket(self, address: tuple[Any, ...]) -> Any:
        """A socket for a client of TCP; `TCPConnector` takes this function as its factory."""
        self._n_ports += 1
        return SimulatedSocket(address[0], ("127.0.0.1", self._n_ports))

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Raises ConnectionRefusedError."""
        await self._reach(address)
        sock.peer = address

    async def _reach(self, address: Address) -> SimulatedServer:
        chance = self.chance("connect")
        await asyncio.sleep(chance.choice((0.0, 1e-4, chance.uniform(0, 0.02))))
        server = self.listening.get(address)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return server

    async def create_connection(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        sock = kwargs.get("sock")
        if sock is None:
            sock = self.simulated_socket((socket.AF_INET,))
            await self.sock_connect(sock, args[:2])
        return await self._connected(protocol_factory, sock)

    async def create_unix_connection(
        self, protocol_factory: Any, path: Any = None, **_: Any
    ) -> Any:
        await self._reach(os.fspath(path))
        sock = SimulatedSocket(socket.AF_UNIX, "", os.fspath(path))
        return await self._connected(protocol_factory, sock)

    async def _connected(self, factory: Any, sock: SimulatedSocket) -> Any:
        server = self.listening.get(sock.peer)
        theirs = SimulatedSocket(sock.family, sock.peer, sock.name)
        one, other = self.pair(sock, theirs, None if server is None else server.owner)
        protocol = factory()
        one.attach(protocol)

        def accept() -> None:
            if server is None or not server.is_serving():
                other.is_shut = True
                one.reset()
            else:
                other.attach(server.factory())

        chance = self.chance("accept")
        self.call_later(chance.choice((0.0, 1e-4, chance.uniform(0, 0.01))), accept)
        return one, protocol

    async def create_server(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises OSError if the address is in use. A socket that is bound already is a real one."""
        sock = kwargs.get("sock")
        if sock is None:
            return self._listen((args[0], args[1]), protocol_factory)
        address = sock.getsockname()
        sock.close()
        return self._listen(address, protocol_factory)

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        """Raises OSError if the path is in use."""
        return self._listen(os.fspath(path), protocol_factory)

    def _listen(self, address: Address, factory: Callable[[], Any]) -> SimulatedServer:
        if address in self.listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        server = self.listening[address] = SimulatedServer(self, address, factory)
        if server.owner is not None:
            server.owner.servers.append(server)
        return server

    async def connect_read_pipe(self, protocol_factory: Any, pipe: Any) -> Any:
        return self._attach_pipe(protocol_factory(), pipe)

    async def connect_write_pipe(self, protocol_factory: Any, pipe: Any) -> Any:
        return self._attach_pipe(protocol_factory(), pipe)

    def _attach_pipe(self, protocol: Any, end: SimulatedTransport) -> Any:
        end.attach(protocol)
        return end, protocol
