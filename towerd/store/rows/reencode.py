"""Re-encoding: rewriting a segment file with some rows in other formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towerd.errors import StoreError
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import KVRows
from towerd.store.rows.rows import RowStore, merge_runs
from towerd.store.segments.keys import segment_key
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_writer import Draft, DraftRun
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.tokens import ID_BYTES


@dataclass(frozen=True, slots=True)
class FormatRequest:
    """The requested format of the rows of positions [p0, p1)."""

    p0: int
    p1: int
    format: str
    again: bool = False
    """Whether rows in a stored format that takes more bytes are encoded once more."""

    def applies(self, stored: str, native: KVLayout) -> bool:
        """Whether rows that are in the format `stored` are to be encoded in the requested one."""
        if stored == self.format or native.stored_as(self.format) == native:
            return False
        if stored == NATIVE:
            return True
        nbytes = [native.stored_as(name).token_bytes for name in (self.format, stored)]
        return self.again and nbytes[0] < nbytes[1]


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
            if request.applies(run.format, native):
                n_changed += n
            elif run.format != NATIVE:
                n_kept += n
    return n_changed, n_kept


def reencode(
    state: StoreState, rows: RowStore, file: SegmentFile, requests: Sequence[FormatRequest]
) -> SegmentFile | None:
    """Replace `file` durably by one with its rows in the formats of `requests`: the native ones, and
    those in a stored format where the request says so. Others stay as they are.

    The old file's checksums are verified again first. Its nodes switch in one transaction, then
    it is deleted; loads planned from it use the new file. None if the file was dropped meanwhile.
    Raises RowsDamaged (the old file is in quarantine), DiskFull or StoreError."""
    with state.lock:
        nodes = sorted(state.tree.viewers(file), key=lambda node: node.p0)
        if file.dropped or not nodes:
            return None
        p0, last, prefix = nodes[0].p0, nodes[-1], nodes[-1].prefix_bytes()
    rows.verify(file, last)
    try:
        runs = _runs(file, rows, requests, state.fingerprint.layout, p0, last.p1)
    except (OSError, StateError) as error:
        raise StoreError(f"{file.path} cannot be read again: {error}") from error
    draft = Draft(
        state.digest,
        segment_key(state.digest, last.scope, prefix),
        last.scope,
        prefix[p0 * ID_BYTES :],
        state.fingerprint.layout,
        runs,
    )

    def targets() -> list[Node]:
        return [] if file.dropped else list(state.tree.viewers(file))

    return rows.write_draft(draft, targets)


def _runs(
    file: SegmentFile,
    rows: RowStore,
    requests: Sequence[FormatRequest],
    native: KVLayout,
    p0: int,
    p1: int,
) -> list[DraftRun]:
    """The runs to write: stretches with one origin and one requested format, joined where
    neighbours have the same format."""
    cuts = {p for request in requests for p in (request.p0, request.p1)}
    cuts |= {file.p0 + run.row0 for run in file.runs}
    ends = [p0, *sorted(p for p in cuts if p0 < p < p1), p1]
    runs = []
    for start, end in zip(ends, ends[1:], strict=False):
        parts = rows.pieces(file, start, end)
        origin = next(run for run in file.runs if start - file.p0 < run.end)
        runs.append(DraftRun(parts, _format_of(parts[0], requests, native), origin.derived))
    return merge_runs(runs)


def _format_of(part: KVRows, requests: Sequence[FormatRequest], native: KVLayout) -> str:
    """The resulting format of a stretch: the requested one if the request applies, or its own."""
    stored = NATIVE if part.layout.is_native else part.layout.format_name
    for request in requests:
        if request.p0 <= part.p0 < request.p1:
            return request.format if request.applies(stored, native) else stored
    return stored
