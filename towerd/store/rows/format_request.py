"""FormatRequest: the formats that stored rows are to be in, and what re-encoding them would change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from towerd.slots.layout import NATIVE, KVLayout
from towerd.store.segments.coded_format import is_coded
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_header import FormatRun


@dataclass(frozen=True, slots=True)
class FormatRequest:
    """The requested format of the rows of positions [p0, p1)."""

    p0: int
    p1: int
    format: str
    again: Collection[str] = ()
    """Stored formats out of which rows are encoded once more, where that takes fewer bytes."""

    def applies(self, run: FormatRun, native: KVLayout) -> bool:
        """Whether the rows of a run are to be encoded in the requested format. What is transform-coded, or
        was, is never encoded again."""
        stored = run.format
        if run.is_decoded:
            return False
        if is_coded(self.format):
            return stored == NATIVE or stored in self.again
        if stored == self.format or native.stored_as(self.format) == native:
            return False
        if stored == NATIVE:
            return True
        nbytes = [native.stored_as(name).token_bytes for name in (self.format, stored)]
        return stored in self.again and nbytes[0] < nbytes[1]

    def token_bytes(self, native: KVLayout) -> int:
        """Bytes of a row in the format; of a transform coding about as many."""
        if is_coded(self.format):
            return native.token_bytes // CODED_SHARE
        return native.stored_as(self.format).token_bytes


CODED_SHARE = 7
"""Native rows take about so many times the bytes of transform-coded ones."""


def differs(
    file: SegmentFile, requests: Sequence[FormatRequest], native: KVLayout
) -> tuple[int, int]:
    """(number of rows that re-encoding would change, number that it would keep in another stored
    format than requested): only a request for that encodes approximate rows again."""
    n_changed = n_kept = 0
    for request in requests:
        for run in file.runs:
            n = min(request.p1 - file.p0, run.end) - max(request.p0 - file.p0, run.row0)
            if n <= 0 or run.format == request.format:
                continue
            if request.applies(run, native):
                n_changed += n
            elif run.format != NATIVE and not is_coded(run.format):
                n_kept += n
    return n_changed, n_kept


def bytes_after(file: SegmentFile, requests: Sequence[FormatRequest], native: KVLayout) -> int:
    """Bytes of the file after re-encoding, without what headers and padding differ by."""
    n_bytes = file.nbytes
    for request in requests:
        for run in file.runs:
            n = min(request.p1 - file.p0, run.end) - max(request.p0 - file.p0, run.row0)
            if n > 0 and request.applies(run, native):
                n_bytes -= n * file.run_bytes(run, native) // run.n_rows
                n_bytes += n * request.token_bytes(native)
    return n_bytes


def format_of(p0: int, run: FormatRun, requests: Sequence[FormatRequest], native: KVLayout) -> str:
    """The resulting format of a stretch of a run that begins at `p0`: the requested one if the request
    applies, or its own."""
    for request in requests:
        if request.p0 <= p0 < request.p1:
            return request.format if request.applies(run, native) else run.format
    return run.format
