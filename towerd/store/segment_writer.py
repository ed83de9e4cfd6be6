"""Writing one immutable segment file: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from towerd.slots.rows import KVRows, check_consecutive
from towerd.store import durable
from towerd.store.segment_header import (
    CHECKSUM_BYTES,
    NATIVE,
    BoundaryEntry,
    Header,
    PlaneEntry,
    checksum,
    encode_head,
    page_up,
    plane_shapes,
)

CHUNK_BYTES = 1 << 22
SUFFIX = ".twr"


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be written: rows of consecutive parts and the identity they get."""

    fingerprint: bytes
    key: bytes
    scope: str
    ids: bytes
    parts: Sequence[KVRows]
    boundaries: Mapping[int, bytes] = field(default_factory=dict)
    """Position in (p0, p1] -> opaque state."""


@dataclass(slots=True)
class _Extent:
    kind: Literal["k", "v", "ext"]
    layer: int
    ggml_type: int
    row_bytes: int
    offset: int
    nbytes: int

    def entry(self, digest: bytes) -> PlaneEntry:
        return PlaneEntry(
            self.kind, self.layer, self.ggml_type, self.row_bytes, NATIVE,
            self.offset, self.nbytes, digest,
        )  # fmt: skip


def new_name() -> str:
    """A file name that nobody can guess or has used."""
    return secrets.token_hex(16) + SUFFIX


def write_segment(draft: Draft, name: str, tmp: Path, final: Path, pool: Executor) -> int:
    """Write `final/name` durably through `tmp/name`; returns its size in bytes.

    Raises OSError, and then nothing is left behind."""
    extents, n_planes = _place(draft)
    boundaries, n_data = _place_boundaries(draft, n_planes)
    blank = [extent.entry(bytes(CHECKSUM_BYTES)) for extent in extents]
    start = len(encode_head(_header(draft, blank, boundaries)))
    path = tmp / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            durable.reserve(fd, start + n_data)
            digests = _write_planes(fd, start, extents, draft.parts, pool)
            entries = [
                extent.entry(digest) for extent, digest in zip(extents, digests, strict=True)
            ]
            for entry in boundaries:
                _write(fd, memoryview(draft.boundaries[entry.position]), start + entry.offset)
            head = encode_head(_header(draft, entries, boundaries))
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
    fd: int, start: int, extents: Sequence[_Extent], parts: Sequence[KVRows], pool: Executor
) -> list[bytes]:
    """Write every plane side by side; returns their checksums."""
    jobs: list[Future[bytes]] = []
    try:
        for extent in extents:
            jobs.append(pool.submit(_write_plane, fd, start, extent, parts))
    finally:
        wait(jobs)  # the caller closes fd next: no job may outlive this
    return [job.result() for job in jobs]


def _header(draft: Draft, planes: list[PlaneEntry], boundaries: list[BoundaryEntry]) -> Header:
    return Header(
        draft.fingerprint, draft.key, draft.scope, draft.parts[0].p0, draft.parts[-1].p1,
        draft.ids, planes, boundaries,
    )  # fmt: skip


def _place(draft: Draft) -> tuple[list[_Extent], int]:
    """Each plane on a page of its own; the extents and the end of the last."""
    layout = check_consecutive(draft.parts)
    n = draft.parts[-1].p1 - draft.parts[0].p0
    extents, at = [], 0
    for kind, layer, ggml_type, row_bytes in plane_shapes(layout):
        extents.append(_Extent(kind, layer, ggml_type, row_bytes, at, n * row_bytes))
        at = page_up(at + n * row_bytes)
    return extents, at


def _place_boundaries(draft: Draft, at: int) -> tuple[list[BoundaryEntry], int]:
    entries = []
    for position in sorted(draft.boundaries):
        state = draft.boundaries[position]
        entries.append(BoundaryEntry(position, at, len(state), checksum(state)))
        at = page_up(at + len(state))
    return entries, at


def _write_plane(fd: int, start: int, extent: _Extent, parts: Sequence[KVRows]) -> bytes:
    h = xxhash.xxh3_128()
    at = start + extent.offset
    for part in parts:
        for chunk in _chunks(_plane(part, extent)):
            h.update(chunk)
            _write(fd, chunk, at)
            at += len(chunk)
    return h.digest()


def _plane(part: KVRows, extent: _Extent) -> npt.NDArray[np.uint8]:
    if extent.kind == "ext":
        assert part.ext is not None
        return np.ascontiguousarray(part.ext).view(np.uint8).reshape(len(part), -1)
    return (part.k if extent.kind == "k" else part.v)[extent.layer]


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
