"""Transform coding of rows that are written again: native ones and those in block formats are encoded, coded
ones are carried over as they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from towerd.codec.errors import CodecError
from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis
from towerd.kernels import dispatch
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import HeadRows, KVRows, join
from towerd.store.segments.coded_format import CodedPiece
from towerd.store.segments.segment_writer import DraftRun
from towerd.tokens import Provenance

PIECE_ROWS = 1024
"""Rows of a piece of a file; a head of its own takes 70 bytes."""
STEP_ROWS = coded.PAGE_ROWS
"""Rows that are encoded between two pauses: those of a page, the fewest that there are."""
_UNFINISHED_MAX = 3
"""A file that was unused for long, one of those that are worth least, and rows in memory may be unfinished at
the same time."""

Encoded: TypeAlias = MutableMapping[int, bytes]
"""What is encoded of a stretch of rows, by first position."""


class CodingInterrupted(Exception):
    """Raised by `pause`: something else needs the cores. What was encoded so far is remembered."""


class UnfinishedCodings:
    """What is encoded of the last few files whose encoding was interrupted. For one thread."""

    def __init__(self) -> None:
        self._files: OrderedDict[Hashable, dict[Hashable, Encoded]] = OrderedDict()

    def of(self, file: Hashable, stretch: Hashable) -> Encoded:
        """What there is of a stretch of a file's rows, to be added to. file: what no other file ever is, as the id of
        one that is gone may be given to a new one"""
        found = self._files.setdefault(file, {})
        self._files.move_to_end(file)
        while len(self._files) > _UNFINISHED_MAX:
            self._files.popitem(last=False)
        return found.setdefault(stretch, {})

    def forget(self, file: Hashable) -> None:
        """A file is finished."""
        self._files.pop(file, None)


def encoded_run(
    parts: Sequence[KVRows],
    format: str,
    origin: Provenance,
    basis: Basis,
    coding: str,
    pause: Callable[[], object],
    done: Encoded | None = None,
    pool: Executor | None = None,
) -> DraftRun:
    """Consecutive rows, native or in block formats, as a transform-coded run. pause: called before each
    STEP_ROWS and within them, in `pool`, returns when the next ones may be encoded, or raises; done: what was encoded when it was
    interrupted before, and gets what is encoded now; pool: what encodes, one step at a time; None: this thread

    Raises ValueError for rows that cannot be coded."""
    done = {} if done is None else done
    pieces = []
    for at in range(parts[0].p0, parts[-1].p1, PIECE_ROWS):
        end = min(at + PIECE_ROWS, parts[-1].p1)
        steps = []
        for first in range(at, end, STEP_ROWS):
            if first not in done:
                pause()
                step = parts, first, min(first + STEP_ROWS, end), basis, coding, pause
                done[first] = (
                    _encode(*step) if pool is None else pool.submit(_encode, *step).result()
                )
            steps.append(coded.parse(done[first]))
        pieces.append(CodedPiece(at, end - at, coded.joined(steps)))
    heads = [part.head for part in parts if part.head is not None]
    return DraftRun((), format, origin, pieces, heads)


def _encode(
    parts: Sequence[KVRows],
    p0: int,
    p1: int,
    basis: Basis,
    coding: str,
    pause: Callable[[], object],
) -> bytes:
    """The rows [p0, p1) of these as coded rows. Raises ValueError."""
    assert basis.rope is not None
    try:
        rows = _native(parts, p0, p1, basis.layout)
        return coded.encode(rows, basis, coding, basis.rope, n_threads=1, pause=pause)
    except CodecError as error:
        raise ValueError(str(error)) from error


def carried_runs(
    found: Iterator[CodedPiece | KVRows],
    format: str,
    origin: Provenance,
    head: Callable[[int, int], HeadRows | None],
) -> Iterator[DraftRun]:
    """What `SegmentFile.carried` gives as runs: pieces as they are, decoded rows natively."""
    for is_rows, group in groupby(found, lambda each: isinstance(each, KVRows)):
        each = list(group)
        if is_rows:
            parts = [part for part in each if isinstance(part, KVRows)]
            rows = [replace(part, head=head(part.p0, part.p1)) for part in parts]
            yield DraftRun(rows, NATIVE, max(origin, Provenance.APPROXIMATE))
            continue
        pieces = [piece for piece in each if isinstance(piece, CodedPiece)]
        of_head = head(pieces[0].p0, pieces[-1].p0 + pieces[-1].n_rows)
        yield DraftRun((), format, origin, pieces, () if of_head is None else (of_head,))


def _native(parts: Sequence[KVRows], p0: int, p1: int, native: KVLayout) -> KVRows:
    """The rows [p0, p1), decoded if they are in a block format, in one value without a head."""
    inside = [part.slice(p0, p1) for part in parts if part.p0 < p1 and p0 < part.p1]
    return join([_decoded(part, native) for part in inside])


def _decoded(rows: KVRows, native: KVLayout) -> KVRows:
    planes = tuple(
        plane if have == want else dispatch.transcoded(plane, have.format.name, want.format.name, 1)
        for plane, have, want in zip(rows.planes(), rows.layout.planes, native.planes, strict=True)
    )
    k, v = planes[: native.n_layer], planes[native.n_layer :]
    return KVRows(native, rows.positions, k, v, rows.ext)
