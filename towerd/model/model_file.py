"""ModelFile: a model's file, and the hash of its bytes, remembered and checked before use.

Hashing a file of weights takes a second per gigabyte, so the hash is kept in the catalog with the
file's device, inode, size, times and a hash of sampled pages. A file for which these are the same
has the same hash, unless its file system does not record changes and no sampled page differs;
`WeightsCheck` finds those.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from towerd.errors import DiskFull, ModelError
from towerd.models.hub.file_names import parts_of

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
N_SAMPLES = 128
"""Sampled pages besides the first and the last one."""
CHUNK_BYTES = 8 << 20
_SEED = 0x746F776572


class Memo(Protocol):
    """Small values by key: `towerd.store.Catalog` while a store is opened, then `Store`."""

    def get_meta(self, key: str) -> str | None: ...
    def set_meta(self, key: str, value: str) -> None: ...


class FileState(msgspec.Struct, frozen=True):
    """What the file system says about a file; it differs after most changes."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """Unlike `mtime_ns` it cannot be set by a program."""

    @classmethod
    def of(cls, stat: os.stat_result) -> FileState:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    def is_file_of(self, other: FileState) -> bool:
        """Whether both are the same file, changed or not."""
        return (self.device, self.inode) == (other.device, other.inode)


class KnownFile(msgspec.Struct, frozen=True):
    """The catalog's entry about a file."""

    state: FileState
    sample: str
    hash: str
    verified: float
    """Unix time at which all of the file was read and had this hash."""


class ModelFile:
    """A file of weights, kept open, so that a file that replaces it is noticed. Open it before the
    weights are loaded, `identify` it afterwards, then close it."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that cannot be opened."""
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"Cannot read the model {path}: {error.strerror}.") from error
        self._opened = self.state()
        self._known: KnownFile | None = None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def known(self) -> KnownFile:
        """The file as it was identified or verified last."""
        assert self._known is not None, "identify it first"
        return self._known

    def state(self) -> FileState:
        """What the open file looks like now."""
        return FileState.of(os.fstat(self._file.fileno()))

    def is_in_place(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return FileState.of(self.path.stat()).is_file_of(self._opened)
        except OSError:
            return False

    def reopen(self) -> None:
        """Switch to the file that the path leads to now; `known` is unchanged."""
        file = self.path.open("rb", buffering=0)
        self._file.close()
        self._file, self._opened = file, FileState.of(os.fstat(file.fileno()))

    def identify(self, memo: Memo) -> str:
        """The hash of the file: the remembered one if the file looks the same, else that of all
        its bytes, which is remembered. Raises ModelError for a file that changes meanwhile."""
        state, sample = self._opened, self.sample()
        known = _recall(memo, state)
        if known is None or (known.state, known.sample) != (state, sample):
            if known is not None and known.state == state:
                log.warning("the model's file was changed in place", extra={"path": str(self.path)})
            known = KnownFile(state, sample, self.hash(), time.time())
            with suppress(DiskFull):
                _remember(memo, known)
        if self.state() != state or not self.is_in_place():
            raise ModelError(
                f"{self.path} was changed while it was loaded: start towerd when it is complete."
            )
        self._known = known
        return known.hash

    def sample(self) -> str:
        """BLAKE2b-128 of the sampled pages, some milliseconds. Which pages depends on the size
        alone."""
        fd, size = self._file.fileno(), self.state().size
        offsets = sample_offsets(size)
        if hasattr(os, "posix_fadvise"):
            for offset in offsets:  # the disk can fetch them side by side
                os.posix_fadvise(fd, offset, PAGE_BYTES, os.POSIX_FADV_WILLNEED)
        digest = hashlib.blake2b(digest_size=16)
        for offset in offsets:
            digest.update(os.pread(fd, PAGE_BYTES, offset))
        return digest.hexdigest()

    def hash(self, between: Callable[[], None] = lambda: None) -> str:
        """BLAKE2b-256 of all bytes in hex, about 1 GB/s. `between` is called after every few
        megabytes; what it raises ends the reading."""
        digest, at = hashlib.blake2b(digest_size=32), 0
        with open(os.dup(self._file.fileno()), "rb", buffering=0) as file:
            while chunk := os.pread(file.fileno(), CHUNK_BYTES, at):
                digest.update(chunk)
                at += len(chunk)
                between()
        return digest.hexdigest()

    def verified(self, memo: Memo, state: FileState, sample: str) -> None:
        """All of the file was read, beginning when it had this state, and has the known hash."""
        self._known = KnownFile(state, sample, self.known.hash, time.time())
        _remember(memo, self._known)

    def forget(self, memo: Memo) -> None:
        """Make the next start read all of the file."""
        memo.set_meta(_key(self.state()), "")


def open_parts(path: Path) -> tuple[ModelFile, ...]:
    """The files of the model whose first file is `path`. Raises ModelError."""
    files: list[ModelFile] = []
    try:
        for part in parts_of(path):
            files.append(ModelFile(part))
    except ModelError:
        for file in files:
            file.close()
        raise
    return tuple(files)


def weights_hash(files: Sequence[ModelFile], memo: Memo) -> str:
    """The hash of a model's files, see `ModelFile.identify`: of one file its own."""
    hashes = [file.identify(memo) for file in files]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.blake2b("".join(hashes).encode(), digest_size=32).hexdigest()


def file_hash(path: Path, memo: Memo) -> str:
    """The hash of a file's bytes, see `ModelFile.identify`."""
    with ModelFile(path) as file:
        return file.identify(memo)


def sample_offsets(size: int) -> list[int]:
    """The first page, the last, and one of each of N_SAMPLES equal parts, ascending."""
    chance = random.Random(_SEED)
    n_pages = -(-size // PAGE_BYTES)
    pages = {0, max(0, n_pages - 1)}
    pages |= {
        min(int((part + chance.random()) * n_pages / N_SAMPLES), n_pages - 1)
        for part in range(N_SAMPLES)
    }
    return [page * PAGE_BYTES for page in sorted(pages) if page >= 0]


def _key(state: FileState) -> str:
    return f"model_file:{state.device}:{state.inode}"


def _recall(memo: Memo, state: FileState) -> KnownFile | None:
    try:
        return msgspec.json.decode(memo.get_meta(_key(state)) or "", type=KnownFile)
    except msgspec.DecodeError:
        return None


def _remember(memo: Memo, known: KnownFile) -> None:
    memo.set_meta(_key(known.state), msgspec.json.encode(known).decode())
