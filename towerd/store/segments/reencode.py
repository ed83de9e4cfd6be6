"""Re-encoding: rewriting a segment file with some rows in other formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towerd.errors import StoreError
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import KVRows
from towerd.store.prefix.keys import segment_key
from towerd.store.prefix.node import Node
from towerd.store.segments.rows import RowStore, merge_runs
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_writer import Draft, DraftRun
from towerd.store.state import StoreState
from towerd.tokens import ID_BYTES


@dataclass(frozen=True, slots=True)
class Wish:
    """The wanted format of the rows of positions [p0, p1)."""

    p0: int
    p1: int
    format: str


def differs(file: SegmentFile, wishes: Sequence[Wish], native: KVLayout) -> tuple[int, int]:
    """(rows that re-encoding would change, rows in another stored format than wished, which it
    would keep: rows that are approximate already are never encoded a second time)."""
    n_changed = n_kept = 0
    for wish in wishes:
        for run in file.runs:
            n = min(wish.p1 - file.p0, run.end) - max(wish.p0 - file.p0, run.row0)
            if n <= 0 or run.format == wish.format:
                continue
            if run.format != NATIVE:
                n_kept += n
            elif native.stored_as(wish.format) != native:
                n_changed += n
    return n_changed, n_kept


def reencode(
    state: StoreState, rows: RowStore, file: SegmentFile, wishes: Sequence[Wish]
) -> SegmentFile | None:
    """Put a new file in the place of `file`, durably: native rows in the formats of `wishes`
    (those that none covers stay native), rows in a stored format as they are.

    The old file's checksums are verified first, whatever was verified before. Its nodes switch
    in one transaction, then it is deleted; who planned to load from it gets the new one. None
    if the file was dropped meanwhile. Raises RowsDamaged (the old file is in quarantine),
    DiskFull or StoreError."""
    with state.lock:
        nodes = sorted(state.trie.viewers(file), key=lambda node: node.p0)
        if file.dropped or not nodes:
            return None
        p0, last, prefix = nodes[0].p0, nodes[-1], nodes[-1].prefix_bytes()
    rows.verify(file, last)
    try:
        runs = _runs(file, rows, wishes, state.fingerprint.layout, p0, last.p1)
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
        return [] if file.dropped else list(state.trie.viewers(file))

    return rows.write_draft(draft, targets)


def _runs(
    file: SegmentFile, rows: RowStore, wishes: Sequence[Wish], native: KVLayout, p0: int, p1: int
) -> list[DraftRun]:
    """Every stretch with one origin and one wish; neighbours of one format are joined."""
    cuts = {p for wish in wishes for p in (wish.p0, wish.p1)}
    cuts |= {file.p0 + run.row0 for run in file.runs}
    ends = [p0, *sorted(p for p in cuts if p0 < p < p1), p1]
    runs = []
    for start, end in zip(ends, ends[1:], strict=False):
        parts = rows.pieces(file, start, end)
        origin = next(run for run in file.runs if start - file.p0 < run.end)
        runs.append(DraftRun(parts, _format_of(parts[0], wishes, native), origin.derived))
    return merge_runs(runs)


def _format_of(part: KVRows, wishes: Sequence[Wish], native: KVLayout) -> str:
    """The resulting format of a stretch: its own stored format, or the wished one if it saves
    space."""
    if not part.layout.is_native:
        return part.layout.format_name
    wished = next((wish.format for wish in wishes if wish.p0 <= part.p0 < wish.p1), NATIVE)
    return NATIVE if native.stored_as(wished) == native else wished
