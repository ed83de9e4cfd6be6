"""Writing the daemon's own traffic as a trace: `towerd-trace/1`, described in lab/replay/README.md.

Each request appends one line when its answer has ended. Tokens appear only as hashes of blocks,
keyed with a secret of that trace which is never written to the file: equal beginnings can be seen,
but texts cannot be guessed. Each hash covers its block and everything before it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from towerd.errors import ConfigError
from towerd.store.sessions.turn import Turn
from towerd.tokens import Ids

log = logging.getLogger(__name__)

FORMAT = "towerd-trace/1"
BLOCK_TOKENS = 16
_HEAD_BYTES_MAX = 4096
_SESSIONS_MAX = 4096
_SECRET_BYTES = 32
_ID_BITS = 63

GetMeta = Callable[[str], str | None]
SetMeta = Callable[[str, str], None]


class TraceRecorder:
    """One open trace file. Thread-safe."""

    def __init__(self, file: BinaryIO, secret: bytes, start_s: float, block_tokens: int) -> None:
        """Use `TraceRecorder.open`."""
        self.n_requests = 0
        self._file = file
        self._secret = secret
        self._start_s = start_s
        self._block_tokens = block_tokens
        self._last: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, path: Path, get: GetMeta, put: SetMeta, now: float, block_tokens: int = BLOCK_TOKENS
    ) -> TraceRecorder:
        """Create the trace `path`, or append to one created with the same `get` and `put`, which
        keep its secret. Raises ConfigError if it is another file or cannot be written."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"The trace {path} cannot be written: {error.strerror}; name another with --record."
            ) from error
        file = os.fdopen(fd, "r+b")
        try:
            head = file.readline(_HEAD_BYTES_MAX)
            if not head:
                return cls._begin(file, put, now, block_tokens)
            return cls._resume(file, path, head, get)
        except BaseException:
            file.close()
            raise

    @classmethod
    def _begin(cls, file: BinaryIO, put: SetMeta, now: float, block_tokens: int) -> TraceRecorder:
        id, secret = secrets.token_hex(8), secrets.token_bytes(_SECRET_BYTES)
        put(_meta_key(id), secret.hex())
        head = {"format": FORMAT, "id": id, "block_size": block_tokens, "start": now}
        file.write(msgspec.json.encode(head) + b"\n")
        file.flush()
        return cls(file, secret, now, block_tokens)

    @classmethod
    def _resume(cls, file: BinaryIO, path: Path, head: bytes, get: GetMeta) -> TraceRecorder:
        try:
            values = msgspec.json.decode(head, type=_Head)
        except msgspec.DecodeError:
            raise ConfigError(
                f"{path} is not a trace of towerd's: name another file with --record."
            ) from None
        secret = get(_meta_key(values.id)) if values.format == FORMAT else None
        if secret is None:
            raise ConfigError(
                f"The trace {path} was recorded by another store: name another file with --record."
            )
        _cut_torn_line(file)
        return cls(file, bytes.fromhex(secret), values.start, values.block_size)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def add(self, turn: Turn, session: str, answered_s: float) -> None:
        """Append one request. On a full disk only this line is lost."""
        ids = self._blocks(turn.prompt, turn.scope)
        with self._lock:
            name = self._name(f"{turn.scope}\n{session}")
            before = self._last.get(name, [])
            kept = next(
                (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b),
                min(len(before), len(ids)),
            )
            self._last[name] = ids
            self._last.move_to_end(name)
            if len(self._last) > _SESSIONS_MAX:
                self._last.popitem(last=False)
            line = {
                "t": round(turn.started_s - self._start_s, 6),
                "s": name,
                "in": len(turn.prompt),
                "out": len(turn.reply),
                "kept": kept,
                "new": ids[kept:],
                "stop": turn.stop,
                "api_time": round(max(0.0, answered_s - turn.started_s), 6),
                "agent": self._name(turn.agent),
                "base": turn.n_base,
                "workflow": self._name(turn.workflow),
            }
            try:
                self._file.write(msgspec.json.encode(line) + b"\n")
                self._file.flush()
                self.n_requests += 1
            except OSError as error:
                log.error("the trace cannot be written", extra={"error": str(error)})

    def _blocks(self, prompt: Ids, scope: str) -> list[int]:
        """The id of every full block; a prompt shorter than one block has a single id."""
        n = max(1, len(prompt) // self._block_tokens)
        data = np.asarray(prompt, "<i4").tobytes()
        size = 4 * self._block_tokens
        at = hashlib.blake2b(scope.encode(), key=self._secret, digest_size=8).digest()
        found: list[int] = []
        for i in range(n):
            block = data[i * size : (i + 1) * size]
            at = hashlib.blake2b(at + block, key=self._secret, digest_size=8).digest()
            found.append(int.from_bytes(at, "little") & ((1 << _ID_BITS) - 1))
        return found

    def _name(self, name: str | None) -> str:
        """A keyed hash of a name; empty for no name."""
        if not name:
            return ""
        return hashlib.blake2b(name.encode(), key=self._secret, digest_size=8).hexdigest()


class _Head(msgspec.Struct):
    """The first line of a trace."""

    format: str
    id: str
    block_size: int
    start: float


def _meta_key(id: str) -> str:
    return f"trace_secret/{id}"


def _cut_torn_line(file: BinaryIO) -> None:
    """Seek to the end and remove an incomplete last line, left by a crash."""
    end = file.seek(0, os.SEEK_END)
    at = end
    while at > 0:
        file.seek(max(0, at - _HEAD_BYTES_MAX))
        found = file.read(at - file.tell()).rfind(b"\n")
        at = max(0, at - _HEAD_BYTES_MAX)
        if found >= 0:
            end = at + found + 1
            break
    file.seek(end)
    file.truncate()
