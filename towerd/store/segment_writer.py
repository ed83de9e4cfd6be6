"""Writing one immutable segment file: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from towerd.kernels import dispatch
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows, check_positions
from towerd.store import durable
from towerd.store.run import Run
from towerd.store.segment_header import (
    CHECKSUM_BYTES,
    Header,
    PlaneEntry,
    RunEntry,
    Shape,
    encode_head,
    page_up,
    plane_shapes,
)

CHUNK_BYTES = 1 << 22
SUFFIX = ".twr"


@dataclass(frozen=True, slots=True)
class DraftRun:
    """Rows to be kept in one format. Parts in another one are encoded while they are written;
    they must be native then."""

    parts: Sequence[KVRows]
    format: str
    derived: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of all parts."""
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be written: consecutive runs and the identity they get."""

    fingerprint: bytes
    key: bytes
    scope: str
    ids: bytes
    native: KVLayout
    runs: Sequence[DraftRun]

    @property
    def p0(self) -> int:
        """The first position."""
        return self.runs[0].parts[0].p0

    @property
    def p1(self) -> int:
        """The last position plus one."""
        return self.runs[-1].parts[-1].p1

    @property
    def run_table(self) -> tuple[Run, ...]:
        """What the catalog says of the runs."""
        table: list[Run] = []
        for run in self.runs:
            at = table[-1].end if table else 0
            table.append(Run(at, run.n_rows, run.format, run.derived))
        return tuple(table)


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where one plane of one run goes."""

    run: DraftRun
    index: int
    """Its number among the run's planes."""
    shape: Shape
    offset: int
    nbytes: int

    def entry(self, digest: bytes) -> PlaneEntry:
        return PlaneEntry(*self.shape, self.offset, self.nbytes, digest)


def new_name() -> str:
    """A file name that nobody can guess or has used."""
    return secrets.token_hex(16) + SUFFIX


def write_segment(draft: Draft, name: str, tmp: Path, final: Path, pool: Executor) -> int:
    """Write `final/name` durably through `tmp/name`; returns its size in bytes.

    Raises OSError, and then nothing is left behind."""
    extents, n_data = _place(draft)
    blank = [bytes(CHECKSUM_BYTES)] * len(extents)
    start = len(encode_head(_header(draft, extents, blank)))
    path = tmp / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            durable.reserve(fd, start + n_data)
            digests = _write_planes(fd, start, extents, draft.native, pool)
            head = encode_head(_header(draft, extents, digests))
            assert len(head) == start
            _write(fd, memoryview(head), 0)
            durable.sync(fd)
        finally:
            os.close(fd)
        os.rename(path, final / name)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    durable.sync_dir(final)
    return start + n_data


def _write_planes(
    fd: int, start: int, extents: Sequence[_Extent], native: KVLayout, pool: Executor
) -> list[bytes]:
    """Write every plane side by side; returns their checksums."""
    jobs: list[Future[bytes]] = []
    try:
        for extent in extents:
            jobs.append(pool.submit(_write_plane, fd, start, extent, native))
    finally:
        wait(jobs)  # the caller closes fd next: no job may outlive this
    return [job.result() for job in jobs]


def _header(draft: Draft, extents: Sequence[_Extent], digests: Sequence[bytes]) -> Header:
    entries = [extent.entry(digest) for extent, digest in zip(extents, digests, strict=True)]
    n_planes = len(entries) // len(draft.runs)
    runs = [
        RunEntry(
            run.row0, run.n_rows, run.format, run.derived,
            entries[i * n_planes : (i + 1) * n_planes],
        )
        for i, run in enumerate(draft.run_table)
    ]  # fmt: skip
    return Header(draft.fingerprint, draft.key, draft.scope, draft.p0, draft.p1, draft.ids, runs)


def _place(draft: Draft) -> tuple[list[_Extent], int]:
    """Each plane on a page of its own; the extents and the end of the last."""
    check_positions([part for run in draft.runs for part in run.parts])
    extents, at = [], 0
    for run in draft.runs:
        for index, shape in enumerate(plane_shapes(draft.native, run.format)):
            n_bytes = run.n_rows * shape[3]
            extents.append(_Extent(run, index, shape, at, n_bytes))
            at = page_up(at + n_bytes)
    return extents, at


def _write_plane(fd: int, start: int, extent: _Extent, native: KVLayout) -> bytes:
    h = xxhash.xxh3_128()
    at = start + extent.offset
    for part in extent.run.parts:
        for chunk in _encoded(part, extent, native):
            h.update(chunk)
            _write(fd, chunk, at)
            at += len(chunk)
    return h.digest()


def _encoded(part: KVRows, extent: _Extent, native: KVLayout) -> Iterator[memoryview]:
    """The bytes to write of one part, in order."""
    if extent.shape[0] == "ext":
        assert part.ext is not None
        return _chunks(np.ascontiguousarray(part.ext).view(np.uint8).reshape(len(part), -1))
    rows = (part.k + part.v)[extent.index]
    have = part.layout.planes[extent.index].format
    want = native.stored_as(extent.run.format).planes[extent.index]
    if have == want.format:
        return _chunks(rows)
    assert have.is_cache_type, "approximate rows would be encoded a second time"
    return _converted(rows, have.name, want.format.name)


def _converted(rows: npt.NDArray[np.uint8], have: str, want: str) -> Iterator[memoryview]:
    """The rows in another format, a chunk at a time, so that memory stays bounded."""
    step = max(1, CHUNK_BYTES // rows.shape[1])
    for row in range(0, len(rows), step):
        yield dispatch.transcoded(rows[row : row + step], have, want, 1).reshape(-1).data


def _chunks(plane: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    """The plane's bytes in order; rows that lie apart are gathered a chunk at a time."""
    step = max(1, CHUNK_BYTES // plane.shape[1])
    for row in range(0, len(plane), step):
        chunk = np.ascontiguousarray(plane[row : row + step])
        yield chunk.reshape(-1).data


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        n = os.pwrite(fd, data, at)
        data, at = data[n:], at + n
