"""SegmentFile: one immutable file of rows on disk, mapped when used, checked once."""

from __future__ import annotations

import mmap
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from towerd.slots.errors import StateError
from towerd.slots.fingerprint import Fingerprint
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows
from towerd.store.keys import segment_key
from towerd.store.node import ID_BYTES, Node
from towerd.store.segment_header import (
    BoundaryEntry,
    Header,
    PlaneEntry,
    check_layout,
    checksum,
    decode_head,
)

MAPPED_MAX = 64


@dataclass(frozen=True, slots=True)
class Claim:
    """What the catalog says about a file's content; the file must agree before it is used."""

    fingerprint: Fingerprint
    prefix: bytes
    """Ids [0, p) of a path through the file's rows, p > the file's p0."""
    views: Sequence[tuple[int, bytes]]
    """(p0, ids) of every node that views the file."""


class Mappings:
    """Keeps the most recently used mappings open. Each costs a file descriptor, so files that
    were not used lately stay mapped only as long as someone holds their rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[SegmentFile, mmap.mmap] = OrderedDict()

    def keep(self, file: SegmentFile, mapped: mmap.mmap) -> None:
        """Note a use of `file`."""
        with self._lock:
            self._open[file] = mapped
            self._open.move_to_end(file)
            while len(self._open) > MAPPED_MAX:
                self._open.popitem(last=False)

    def forget(self, file: SegmentFile) -> None:
        """Let go of a file that was dropped."""
        with self._lock:
            self._open.pop(file, None)

    def clear(self) -> None:
        """Let go of every file."""
        with self._lock:
            self._open.clear()


class SegmentFile:
    """A catalogued file holding the rows [p0, p0 + n_rows). `nodes` are those that view it."""

    __slots__ = (
        "_header", "_lock", "_mapped", "_mappings", "_start", "boundaries", "dropped", "id",
        "n_rows", "nbytes", "nodes", "p0", "path", "verified",
    )  # fmt: skip

    def __init__(
        self, id: int, path: Path, p0: int, n_rows: int, nbytes: int,
        boundaries: tuple[int, ...], mappings: Mappings,
    ) -> None:  # fmt: skip
        self.id = id
        self.path = path
        self.p0 = p0
        self.n_rows = n_rows
        self.nbytes = nbytes
        """Size on disk."""
        self.boundaries = boundaries
        """Positions that have a boundary state, ascending."""
        self.nodes: list[Node] = []
        self.verified = False
        self.dropped = False
        self._mappings = mappings
        self._mapped: weakref.ref[mmap.mmap] | None = None
        self._header: Header | None = None
        self._start = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SegmentFile({self.id}, {self.path.name}, [{self.p0}, {self.p0 + self.n_rows}))"

    def verify(self, claim: Claim, pool: Executor) -> None:
        """Check everything there is to check, once per process.

        Raises StateError (damaged, foreign) or OSError (cannot be opened)."""
        with self._lock:
            if self.verified:
                return
            data = self._map()
            header, start = decode_head(memoryview(data))
            self._check_identity(header)
            check_layout(header, claim.fingerprint.layout)
            check_claim(header, claim)
            check_planes(data, header, start, pool)
            self._header, self._start = header, start
            self.verified = True

    def rows(self, layout: KVLayout, p0: int, p1: int) -> KVRows:
        """Rows [p0, p1) as views of the mapped file, which they keep alive.

        The file must be verified. Raises OSError or StateError if it is gone by now."""
        with self._lock:
            data, header, start = self._map(), self._header, self._start
        assert header is not None
        assert self.p0 <= p0 < p1 <= self.p0 + self.n_rows
        cut = np.s_[p0 - self.p0 : p1 - self.p0]
        planes = [_view(data, start, plane, header.n)[cut] for plane in header.planes]
        ext = planes.pop().view(np.int32) if layout.cell_ext else None
        n_k = len(layout.k)
        positions = np.arange(p0, p1, dtype=np.int32)
        return KVRows(layout, positions, tuple(planes[:n_k]), tuple(planes[n_k:]), ext)

    def boundary(self, position: int) -> memoryview:
        """The boundary state at `position`, a view. The file must be verified; KeyError if it
        has no state there, else as `rows`."""
        with self._lock:
            data, header, start = self._map(), self._header, self._start
        assert header is not None
        for entry in header.boundaries:
            if entry.position == position:
                at = start + entry.offset
                return memoryview(data)[at : at + entry.nbytes]
        raise KeyError(position)

    def _check_identity(self, header: Header) -> None:
        found = (header.p0, header.n, tuple(entry.position for entry in header.boundaries))
        if found != (self.p0, self.n_rows, self.boundaries):
            raise StateError("the catalog describes another file under this name")

    def _map(self) -> mmap.mmap:
        data = self._mapped() if self._mapped is not None else None
        if data is None:
            data = map_file(self.path, self.nbytes)
            self._mapped = weakref.ref(data)
        self._mappings.keep(self, data)
        return data


def map_file(path: Path, n_bytes: int) -> mmap.mmap:
    """The whole file, mapped read-only. OSError, or StateError unless it is a regular file of
    exactly `n_bytes` (bounds are checked against this, so nothing reads past the end)."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise StateError("not a regular file")
        if info.st_size != n_bytes or n_bytes == 0:
            raise StateError(f"the file has {info.st_size} bytes, the catalog says {n_bytes}")
        return mmap.mmap(fd, n_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def check_claim(header: Header, claim: Claim) -> None:
    """StateError unless fingerprint, key and ids are those that the catalog has."""
    digest = claim.fingerprint.digest()
    if header.fingerprint != digest:
        raise StateError("the file belongs to another model or configuration")
    before = claim.prefix[: header.p0 * ID_BYTES]
    if segment_key(digest, header.scope, before + header.ids) != header.key:
        raise StateError("the file's key is not that of its tokens")
    for p0, ids in claim.views:
        at = (p0 - header.p0) * ID_BYTES
        if at < 0 or header.ids[at : at + len(ids)] != ids:
            raise StateError("the file's tokens are not the catalog's")


def check_planes(data: mmap.mmap, header: Header, start: int, pool: Executor) -> None:
    """StateError unless every plane and boundary state has its checksum."""
    view = memoryview(data)

    def is_good(entry: PlaneEntry | BoundaryEntry) -> bool:
        at = start + entry.offset
        return checksum(view[at : at + entry.nbytes]) == entry.checksum

    entries: list[PlaneEntry | BoundaryEntry] = [*header.planes, *header.boundaries]
    if not all(list(pool.map(is_good, entries))):
        raise StateError("a checksum does not match: the rows are damaged")


def _view(
    data: mmap.mmap, start: int, plane: PlaneEntry, n: int
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    flat = np.frombuffer(data, np.uint8, plane.nbytes, start + plane.offset)
    return flat.reshape(n, plane.row_bytes)
