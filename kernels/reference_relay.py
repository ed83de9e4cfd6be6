"""A stream of server-sent events from one socket to another, in Python: the specification of
kernels/cpp/relay.cpp.

Where all cores decode, whatever is computed between two tokens delays the next one. So events that
need no second look pass in a thread of their own, which takes no lock of the interpreter.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Sequence
from typing import NamedTuple

READ_BYTES = 16 * 1024
_SIZE_LINE = re.compile(rb"[0-9A-Fa-f]{1,14}\r\n")
_SIZE_LINE_BYTES = 16


class Marks(NamedTuple):
    """How to tell events that need no second look. JSON escapes quotes inside its strings, so a
    mark with quotes around a name cannot stand inside one."""

    goes_on: tuple[bytes, ...]
    """An event with one of these may pass"""
    ends: tuple[bytes, ...]
    """unless it has one of these."""


class Relayed(NamedTuple):
    """What became of what was read."""

    passed: bytes
    """The events that went out, and those in `unsent`."""
    unsent: bytes
    """What the client did not take of them, as it is to be written."""
    rest: bytes
    """What was read beyond, from the first byte of a chunk on."""


def relay(
    up: int, down: int, cancel: int, marks: Marks, bytes_max: int, is_chunked: bool
) -> Relayed:
    """Pass on what `up` says, an HTTP body in chunks, from between two of them on, until something
    else arrives than whole chunks of whole events that may pass, or one of over `bytes_max`; or
    `bytes_max` have passed; or the client takes no more; or `up` ends; or `cancel` can be read.

    up, down: descriptors of sockets that do not block
    cancel: a descriptor
    is_chunked: whether the client gets chunks, too"""
    passed, rest = bytearray(), bytearray()
    while len(passed) < bytes_max and (read := _read_more(up, cancel)):
        rest += read
        out = bytearray()
        is_fine = True
        while rest and (chunk := _first_chunk(rest, bytes_max)) is not None:
            size_bytes, n_bytes = chunk
            data = bytes(rest[size_bytes : n_bytes - 2])
            if not n_bytes or not _may_pass(data, marks):
                is_fine = False
                break
            passed += data
            out += rest[:n_bytes] if is_chunked else data
            del rest[:n_bytes]
        n_sent = _sent_of(down, out)
        if n_sent < len(out):
            return Relayed(bytes(passed), bytes(out[n_sent:]), bytes(rest))
        if not is_fine:
            break
    return Relayed(bytes(passed), b"", bytes(rest))


def _first_chunk(raw: bytearray, bytes_max: int) -> tuple[int, int] | None:
    """(bytes of its size line, bytes of all of it); None: more is to come; (0, 0): not one that
    may pass, the last one included."""
    if b"\r\n" not in raw[:_SIZE_LINE_BYTES]:
        return None if len(raw) < _SIZE_LINE_BYTES else (0, 0)
    line = _SIZE_LINE.match(raw)
    if line is None:
        return 0, 0
    n = int(line[0], 16)
    if not 0 < n <= bytes_max:
        return 0, 0
    n_bytes = line.end() + n + 2
    if len(raw) < n_bytes:
        return None
    return (line.end(), n_bytes) if raw[n_bytes - 2 : n_bytes] == b"\r\n" else (0, 0)


def _may_pass(data: bytes, marks: Marks) -> bool:
    *events, left = data.split(b"\n\n")
    return b"\r" not in data and not left and all(_is_plain(event, marks) for event in events)


def _is_plain(event: bytes, marks: Marks) -> bool:
    return _has_any(event, marks.goes_on) and not _has_any(event, marks.ends)


def _has_any(event: bytes, marks: Sequence[bytes]) -> bool:
    return any(mark in event for mark in marks)


def _sent_of(down: int, out: bytearray) -> int:
    """How much of it the client takes at once."""
    n = 0
    while n < len(out):
        try:
            n += os.write(down, out[n:])
        except OSError:
            break
    return n


def _read_more(up: int, cancel: int) -> bytes:
    """What arrives; empty at the end, on an error, and when told to stop."""
    ready = select.poll()
    ready.register(cancel, select.POLLIN)
    ready.register(up, select.POLLIN)
    while True:
        if any(fd == cancel for fd, _ in ready.poll()):
            return b""
        try:
            return os.read(up, READ_BYTES)
        except BlockingIOError:
            continue
        except OSError:
            return b""
