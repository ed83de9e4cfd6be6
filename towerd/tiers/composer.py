"""Composer: joins stored rows into sequence blobs for llama.cpp.

Rows that already form a blob, in a mapped file or in RAM, are passed on unchanged. The rest
is joined into blobs of a few megabytes: small ones stay in the CPU's cache between our copy
and llama.cpp's, and the caller can attach one while the next is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from towerd.kernels.dispatch import THREADS
from towerd.slots.blob import blob_size, emit_blob
from towerd.slots.labels import Labels, head_at_places, label_places
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows, join_heads
from towerd.store import RowsPart
from towerd.store.files.buffers import BYTES_MAX, BufferPool
from towerd.store.segments.mapped import MAPPED
from towerd.store.segments.segment_writer import BLOB_BYTES_MAX
from towerd.system.ram_limit import NO_LIMIT
from towerd.tiers.plan import Composed

Piece: TypeAlias = tuple[RowsPart, KVRows]
"""Rows, and the part of the plan that describes exactly these rows."""

BLOB_BYTES = 15 << 20
"""Small enough for the CPU's cache, where llama.cpp reads it next, and large enough for a
transposed V: each of its channels is copied in runs of as many elements as the blob has cells, so
that attaching 2,048 tokens of the 1B shape costs 33 ms of CPU with 6 MB, 20 with 12, 18 with 18."""
DIRECT_BYTES_MIN = 6 << 20
"""A blob this large costs less to attach by itself than to be joined with its neighbours."""
_HEADER_BYTES = 1 << 20
"""Room for the rest of a blob besides its rows: 12 bytes per cell and a few per plane."""
_BLOBS_WARM, _STORED_WARM = 3, 2
"""Buffers that are kept ready: for joined blobs, or for those of encrypted files, which are larger."""
_THREADS = max(1, THREADS - 1)
"""One core is left to the thread that attaches the previous blob. On two cores, 8,192 tokens of the
1B shape take 0.099 s with one thread and 0.118 s with two."""
_BLOBS_IN_ROOM, _IDLE_SHARE = 20, 8
"""Where RAM is limited, a blob takes at most a 20th of what is left beside the model, and idle buffers an 8th: some
blobs are on their way at once."""


class Composer:
    """Makes blobs for one context. Thread-safe."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        v_trans: bool,
        tail: bytes,
        room: int = NO_LIMIT,
        lent: BufferPool | None = None,
    ) -> None:
        """v_trans: whether the context has V transposed. tail: bytes that end every blob. room: bytes of RAM that
        all that is not the model may take. lent: buffers that files are decrypted into, which are passed on; None: files
        are passed on as they are mapped"""
        self._layout, self._v_trans, self._tail = layout, v_trans, tail
        self._room, self._is_limited = room, room < NO_LIMIT
        self._buffers, self._decrypts = lent or BufferPool(), lent is not None
        self._buffers.bytes_max = min(BYTES_MAX, room // _IDLE_SHARE)
        self._n_reserved = 0
        self._lock = threading.Lock()

    @property
    def _blob_bytes(self) -> int:
        return min(BLOB_BYTES, self._room // _BLOBS_IN_ROOM)

    def reserve(self, n_tokens: int) -> None:
        """Have buffers ready, soon, for joining the rows of a conversation of `n_tokens`: as many
        blobs as it fills, at most _BLOBS_WARM. What was reserved stays; where RAM is limited, nothing is."""
        if self._is_limited:
            return
        size, most = (BLOB_BYTES_MAX, _STORED_WARM) if self._decrypts else (BLOB_BYTES, _BLOBS_WARM)
        n_blobs = min(most, n_tokens * self._layout.token_bytes // BLOB_BYTES)
        with self._lock:
            n_more = n_blobs - self._n_reserved
            if n_more > 0:
                self._n_reserved = n_blobs
                self._buffers.warm_up(size + _HEADER_BYTES, n_more)

    def blobs(self, pieces: Iterable[Piece], places: Labels | None = None) -> Iterator[Composed]:
        """Consecutive rows as blobs. Raises ValueError for rows that the context cannot hold.

        places: int32[n], where the context is to have each of the tokens [0, n), which rows at another
        place are labelled with; None: at its index"""
        n_max = max(1, self._blob_bytes // max(1, self._layout.token_bytes))
        pending: list[Piece] = []
        n_pending = 0
        for part, rows in pieces:
            if self._is_blob(rows) and _labels(places, rows.p0, rows.p1) is None:
                if pending:
                    yield self._joined(pending, places)
                    pending, n_pending = [], 0
                yield self._unchanged(part, rows)
                continue
            at = rows.p0
            while at < rows.p1:
                end = min(rows.p1, at + n_max - n_pending)
                pending.append((part, rows.slice(at, end)))
                n_pending += end - at
                at = end
                if n_pending == n_max:
                    yield self._joined(pending, places)
                    pending, n_pending = [], 0
        if pending:
            yield self._joined(pending, places)

    def recycle(self, composed: Composed) -> None:
        """Give the blob's buffer back once llama.cpp has copied it."""
        if composed.buffer is not None:
            self._buffers.release(composed.buffer)

    def give_back(self) -> None:
        """Free the buffers that are not in use."""
        self._buffers.clear()

    def _is_blob(self, rows: KVRows) -> bool:
        """Whether the context accepts the bytes that these rows are views of."""
        return (
            rows.blob is not None
            and rows.nbytes >= DIRECT_BYTES_MIN
            and not self._tail
            and rows.layout == self._layout
            and bool(self._layout.v)  # without V the rows do not tell how the blob is framed
            and rows.v_trans == self._v_trans
            and not (self._is_limited and rows.nbytes > self._blob_bytes)
        )

    def _unchanged(self, part: RowsPart, rows: KVRows) -> Composed:
        assert rows.blob is not None
        n, provenance = len(rows), _provenance([(part, rows)])
        n_hot = n if part.tier == "hot" else 0
        return Composed(n, n_hot, n - n_hot, rows.blob, None, provenance, head=rows.head)

    def _joined(self, pieces: list[Piece], places: Labels | None) -> Composed:
        n = sum(len(rows) for _, rows in pieces)
        size = blob_size(self._layout, n) + len(self._tail)
        buffer = self._buffers.acquire(size)
        try:
            emit_blob(
                [rows for _, rows in pieces],
                layout=self._layout,
                v_trans=self._v_trans,
                tail=self._tail,
                out=buffer[:size],
                n_threads=_THREADS,
            )
            p0 = pieces[0][1].p0
            if (labels := _labels(places, p0, p0 + n)) is not None:
                label_places(buffer[:size], p0, labels)
        except BaseException:
            self._buffers.release(buffer)
            raise
        MAPPED.read(size)
        n_hot = sum(len(rows) for part, rows in pieces if part.tier == "hot")
        head = join_heads(rows.head for _, rows in pieces)
        if head is not None and labels is not None:
            head = head_at_places(head, p0, labels)
        parts = [replace(part, p0=rows.p0, p1=rows.p1) for part, rows in pieces]
        decoded = [run for part in parts for run in part.decoded]
        provenance = _provenance(pieces)
        return Composed(n, n_hot, n - n_hot, buffer[:size], buffer, provenance, decoded, head)


def _labels(places: Labels | None, p0: int, p1: int) -> Labels | None:
    """The places of tokens [p0, p1); None if each is at its index."""
    if places is None or np.array_equal(places[p0:p1], np.arange(p0, p1)):
        return None
    return places[p0:p1]


def _provenance(pieces: Iterable[Piece]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.concatenate(
        [part.provenance[rows.p0 - part.p0 : rows.p1 - part.p0] for part, rows in pieces]
    )
