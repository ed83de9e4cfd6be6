"""Segment files as earlier builds wrote them: native rows in planes instead of blobs."""

from __future__ import annotations

from typing import Any

import msgspec

from towerd.slots.blob import parse_blob
from towerd.slots.layout import KVLayout
from towerd.store.segment_header import (
    BlobEntry,
    checksum,
    decode_head,
    page_up,
    plane_shapes,
)


def in_planes(data: bytes, layout: KVLayout) -> tuple[dict[str, Any], int, bytes]:
    """The header's fields, where the data began, and new data, of a file of one native run in
    one blob, without a cell extension."""
    head, start = decode_head(memoryview(data))
    (run,) = head.runs
    (blob,) = run.blobs
    rows = parse_blob(at(data, start, blob), layout=layout).rows
    entries, out = [], b""
    for shape, plane in zip(plane_shapes(layout), rows.planes(), strict=True):
        out = out.ljust(page_up(len(out)), b"\0")
        entries.append([*shape, len(out), plane.nbytes, checksum(plane.tobytes())])
        out += plane.tobytes()
    fields = msgspec.to_builtins(head, builtin_types=(bytes,))
    fields["runs"] = [[run.row0, run.n_rows, run.format, run.derived, entries]]
    return fields, start, out


def at(data: bytes, start: int, blob: BlobEntry) -> bytes:
    """The bytes of a blob."""
    return data[start + blob.offset : start + blob.offset + blob.nbytes]
