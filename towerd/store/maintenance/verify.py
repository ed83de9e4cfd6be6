"""Verification of every file's checksums and of the store's invariants."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from towerd.slots.errors import StateError
from towerd.slots.fingerprint import Fingerprint
from towerd.store.catalog.catalog import Upkeep
from towerd.store.catalog.database import CatalogDamaged
from towerd.store.maintenance.integrity import problems
from towerd.store.rows.checkpoint_check import (
    checkpoint_files,
    checkpoint_problem,
    stray_checkpoints,
)
from towerd.store.rows.collect import orphans
from towerd.store.rows.rows import RowStore
from towerd.store.segments.checkpoint_file import SUFFIX
from towerd.store.segments.format_run import decode_runs
from towerd.store.segments.segment_file import Claim, blob_rows, check_claim, check_pieces, map_file
from towerd.store.segments.segment_header import SegmentHeader, check_layout, decode_head
from towerd.store.sessions.cold import ColdTable
from towerd.store.sessions.foreign import prefix_of
from towerd.store.state.state import StoreState


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read and what was found."""

    segments: int
    files: int
    bytes_read: int
    sessions: int
    quarantined: int
    """Files set aside (only with `repair`)."""
    boundaries: int
    """State checkpoint files."""
    orphans: int
    """Files that the catalog does not list, left by a crash; harmless, gc removes them."""
    problems: tuple[str, ...]
    frozen_sessions: int = 0
    """Sessions whose coded tokens were checked."""
    recovered: tuple[str, ...] = ()
    """What was recovered of catalog and journal since the store was opened, in sentences."""

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self.problems


def verify(
    state: StoreState,
    rows: RowStore,
    cold: ColdTable,
    upkeep: Upkeep,
    pool: Executor,
    progress: Callable[[int, int], None] | None,
    *,
    repair: bool,
) -> VerifyReport:
    """Check the invariants, then every file of every fingerprint and every frozen session."""
    with upkeep.paused(), state.lock:
        found = problems(state, keys=True) + state.catalog.journal_problems()
        n_orphans = len(orphans(state, rows.writing)) + len(stray_checkpoints(state, rows.writing))
        n_segments = len(state.tree)
        n_sessions = int(state.catalog.rows("SELECT count(*) FROM sessions")[0][0])
        files = state.catalog.rows(
            "SELECT files.id, name, p0, bytes, n_rows, fingerprints.json,"
            " files.runs FROM files"
            " JOIN fingerprints ON fingerprints.id = files.fingerprint ORDER BY files.id"
        )
    states = [each for each in checkpoint_files(state.directory.root) if each[0].suffix == SUFFIX]
    total = sum(row[3] for row in files) + sum(size for _, size in states)
    done, n_set_aside = 0, 0
    for row in files:
        problem = _file_problem(state, pool, row)
        if problem is not None and not _is_catalogued(state, row[0]):
            continue  # dropped since the list was made
        if problem is not None:
            found.append(f"{row[1]}: {problem}")
            n_set_aside += repair and _set_aside(state, rows, row[0])
        done += row[3]
        if progress is not None:
            progress(done, total)
    for path, size in states:
        problem = checkpoint_problem(path)
        if problem is not None:
            found.append(f"{path.name}: {problem}")
            n_set_aside += repair and state.directory.set_aside(path)
        done += size
        if progress is not None:
            progress(done, total)
    found += cold.damaged()
    if repair:
        found += _repair(upkeep)
    return VerifyReport(
        n_segments,
        len(files) + len(states),
        done,
        n_sessions,
        n_set_aside,
        len(states),
        n_orphans,
        tuple(found),
        cold.stats()["frozen_sessions"],
        tuple(state.catalog.recovered),
    )


def _repair(upkeep: Upkeep) -> list[str]:
    """Repair catalog and journal; returns the problems that remain."""
    try:
        upkeep.repair()
    except CatalogDamaged:
        return [
            "catalog: its journal is not whole either; restart towerd to recover what both have"
        ]
    return []


def _file_problem(state: StoreState, pool: Executor, row: tuple[Any, ...]) -> str | None:
    id, name, p0, n_bytes, n_rows, text, runs = row
    try:
        fingerprint = Fingerprint.from_json(msgspec.json.decode(text))
        with state.lock:
            views = state.catalog.rows(
                "SELECT p0, ids, node, scope FROM views JOIN segments ON segments.id = node"
                " WHERE file = ? ORDER BY p1",
                (id,),
            )
            if not views:
                return "no segment views it"
            prefix = prefix_of(state, views[-1][2])
        data = map_file(state.directory.segments / name, n_bytes)
        header, start = decode_head(memoryview(data))
        if (header.p0, header.n, header.run_table) != (p0, n_rows, decode_runs(runs, n_rows)):
            return "the catalog describes another file under this name"
        check_layout(header, fingerprint.layout)
        *_, scope = views[-1]
        check_claim(header, Claim(fingerprint, scope, prefix, [view[:2] for view in views]))
        check_pieces(data, header.pieces, start, pool)
        _check_blobs(data, header, start, fingerprint)
    except (StateError, OSError, msgspec.DecodeError) as error:
        return str(error)
    return None


def _check_blobs(
    data: mmap.mmap, header: SegmentHeader, start: int, fingerprint: Fingerprint
) -> None:
    """Raises StateError unless every blob can be read."""
    for run in header.runs:
        at = header.p0 + run.row0
        for blob in run.blobs:
            blob_rows(data, blob, start, fingerprint.layout, at)
            at += blob.n_rows


def _is_catalogued(state: StoreState, file_id: int) -> bool:
    with state.lock:
        return bool(state.catalog.rows("SELECT 1 FROM files WHERE id = ?", (file_id,)))


def _set_aside(state: StoreState, rows: RowStore, file_id: int) -> bool:
    """Quarantine a file of the open fingerprint; other files are handled when their
    fingerprint is opened."""
    with state.lock:
        file = state.files.get(file_id)
    return file is not None and rows.drop_file(file, set_aside=True) > 0
