"""What to write of segments in memory: their consecutive rows as the runs of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from towerd.errors import SegmentsGone, StoreError
from towerd.slots.rows import KVRows
from towerd.slots.runs import Runs
from towerd.store.rows.format_request import FormatRequest, format_of
from towerd.store.segments.segment_header import FormatRun, segment_key
from towerd.store.segments.segment_writer import Draft, DraftRun
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.tokens import ID_BYTES


def covered(nodes: Sequence[Node], p0: int, p1: int) -> list[Node]:
    """The nodes now on the path of `nodes` that lie within [p0, p1), top first. A split since
    `nodes` was taken put new nodes above the old ones, so the path is walked from below."""
    alive = [node for node in nodes if not node.removed]
    if not alive:
        return []
    return [node for node in alive[-1].path() if node.p0 >= p0 and node.p1 <= p1]


def as_split(nodes: Sequence[Node]) -> Sequence[Node]:
    """Consecutive nodes without those that were removed, and with what splits put between them.
    Raises SegmentsGone if all were removed."""
    alive = [node for node in nodes if not node.removed]
    if nodes and not alive:
        raise SegmentsGone("the segments were removed before their rows were written")
    found: list[Node] = []
    at = alive[-1] if alive else None
    while at is not None and at is not alive[0]:
        found.append(at)
        at = at.parent
    return [alive[0], *reversed(found)] if at is not None else nodes


def draft_of(nodes: Sequence[Node], state: StoreState, requests: Sequence[FormatRequest]) -> Draft:
    """What to write for consecutive hot nodes of one scope, in the formats of `requests`. Raises
    StoreError."""
    if not nodes:
        raise StoreError("no segments to write")
    runs: list[DraftRun] = []
    layout = state.row_identity.layout
    for above, node in zip([None, *nodes], nodes, strict=False):
        if node.removed or node.hot is None:
            raise StoreError(f"segment {node.id} has no rows in memory to write")
        if above is not None and (node.parent is not above or node.scope != above.scope):
            raise StoreError("only consecutive segments of one scope can share a file")
        for rows in _cut(node.hot, requests):
            run = FormatRun(0, len(rows), rows.layout.format_name, node.origin)
            name = format_of(rows.p0, run, requests, layout)
            runs.append(DraftRun([rows], name, node.origin))
    first, last = nodes[0], nodes[-1]
    prefix = last.prefix_bytes()
    return Draft(
        state.digest,
        segment_key(state.digest, last.scope, prefix),
        last.scope,
        prefix[first.p0 * ID_BYTES :],
        state.row_identity.layout,
        merge_runs(runs),
    )


def _cut(hot: Runs, requests: Sequence[FormatRequest]) -> Iterator[KVRows]:
    """Rows in memory, cut where a request begins or ends."""
    cuts = {p for request in requests for p in (request.p0, request.p1)}
    ends = [hot.p0, *sorted(p for p in cuts if hot.p0 < p < hot.p1), hot.p1]
    for start, end in zip(ends, ends[1:], strict=False):
        yield from hot.slice(start, end)


def merge_runs(runs: Sequence[DraftRun]) -> list[DraftRun]:
    """Join neighbours of the same format and origin."""
    merged: list[DraftRun] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and (last.format, last.origin) == (run.format, run.origin):
            merged[-1] = DraftRun(
                [*last.parts, *run.parts],
                run.format,
                run.origin,
                [*last.pieces, *run.pieces],
                [*last.coded_heads, *run.coded_heads],
            )
        else:
            merged.append(run)
    return merged


def consecutive(nodes: Sequence[Node]) -> list[list[Node]]:
    """Runs of nodes that follow one another."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and runs[-1][-1].p1 == node.p0:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs
