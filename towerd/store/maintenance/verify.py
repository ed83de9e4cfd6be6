"""Verification of every file's checksums, and of the store's invariants: prefix tree, catalog, files and
sums must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from towerd.codec.errors import NewerVersion
from towerd.errors import RowsDamaged, StoreError
from towerd.slots.errors import StateError
from towerd.slots.row_identity import RowIdentity
from towerd.store.catalog.catalog import Catalog
from towerd.store.catalog.database import CatalogDamaged
from towerd.store.files.file_map import FileMap
from towerd.store.rows.checkpoints import (
    checkpoint_files,
    checkpoint_problem,
    stray_checkpoints,
)
from towerd.store.rows.collect import needed_bases, orphans
from towerd.store.rows.rows import RowStore
from towerd.store.segments.checkpoint_file import SUFFIX
from towerd.store.segments.segment_file import (
    Claim,
    FormatTally,
    SegmentFile,
    blob_rows,
    check_claim,
    check_coded,
    check_pieces,
    head_of,
)
from towerd.store.segments.segment_header import (
    SegmentHeader,
    check_layout,
    decode_runs,
)
from towerd.store.sessions.cold import ColdTable
from towerd.store.sessions.foreign import prefix_of
from towerd.store.sessions.media import MediaTable
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.store.tree.scope import public_of, readable_scopes
from towerd.tokens import ID_BYTES

_LOST = (
    "SELECT turns.id, sessions.id FROM turns JOIN sessions ON sessions.pk = turns.session"
    " LEFT JOIN cold ON cold.session = turns.session AND cold.frozen = 1"
    " WHERE turns.reply_node IS NULL AND n_cached > 0 AND cold.session IS NULL LIMIT 20"
)


def problems(state: StoreState, *, keys: bool) -> list[str]:
    """Inconsistencies; empty if there are none. Call it under the lock."""
    nodes = list(_walk(state))
    found = [problem for node in nodes for problem in _node_problems(state, node)]
    if len(nodes) != len(state.tree.nodes):
        found.append(f"{len(nodes)} nodes are reachable, {len(state.tree.nodes)} are listed")
    found += _sum_problems(state, nodes)
    found += _file_problems(state)
    found += _catalog_problems(state, nodes)
    found += _pin_problems(state, nodes)
    found += state.tree.tower_ends.problems()
    held = list(state.tree.held.values())
    found += [f"{node} was removed from under a request" for node in held if node.removed]
    if keys:
        found += key_problems(state)
    return found


def key_problems(state: StoreState) -> list[str]:
    """Segments whose stored key is not that of their prefix. O(all tokens)."""
    stored = dict(
        state.catalog.rows(
            "SELECT id, key FROM segments WHERE tokenizer = ?", (state.identity.tokenizer,)
        )
    )
    ends = state.tree.tower_ends
    found = [
        f"the tower end {id} has the hash of other tokens"
        for id, key in stored.items()
        if id in state.tree.nodes
        and (end := ends.get(state.tree.nodes[id])) is not None
        and end.hash.digest() != key
    ]
    found += [
        f"segment {node.id} has the key of other tokens"
        for node, key in state.tree.keys(state.identity.tokenizer_digest)
        if stored.get(node.id) != key
    ]
    return found


def _walk(state: StoreState) -> Iterator[Node]:
    stack = list(state.tree.root.children)
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


def _node_problems(state: StoreState, node: Node) -> Iterator[str]:
    parent = node.parent
    assert parent is not None
    if state.tree.nodes.get(node.id) is not node or node.removed:
        yield f"{node} is in the tree but not listed"
    if parent.p1 != node.p0 or len(node.ids) != node.n * ID_BYTES or node.n <= 0:
        yield f"{node} does not continue {parent}"
    if parent.id and parent.scope not in (public_of(node.scope), node.scope):
        yield f"{node} hangs below another scope"
    if (parent.by_token or {}).get((node.scope, node.first)) is not node:
        yield f"{node} is filed under a wrong token"
    if node.hot is not None and (node.hot.p0, node.hot.p1) != (node.p0, node.p1):
        yield f"{node} has hot rows [{node.hot.p0}, {node.hot.p1})"
    if node.hot is not None and not node.hot.fits(state.row_identity.layout):
        yield f"{node} has hot rows of another layout"
    file = node.file
    if file is None:
        return
    if state.files.get(file.id) is not file or node not in state.tree.viewers(file):
        yield f"{node} views a file that does not know it"
    if file.p0 + node.file_row0 != node.p0 or node.file_row0 + node.n > file.n_rows:
        yield f"{node} views rows of other positions"


def _sum_problems(state: StoreState, nodes: list[Node]) -> Iterator[str]:
    hot = sum(node.hot.nbytes for node in nodes if node.hot is not None)
    warm = sum(file.nbytes for file in state.files.values())
    if (hot, warm) != (state.hot_bytes, state.warm_bytes):
        yield f"hot and warm bytes are {(hot, warm)}, counted {(state.hot_bytes, state.warm_bytes)}"
    tally = FormatTally(state.row_identity.layout, state.files.values())
    if tally.n_rows != state.formats.n_rows or tally.moved_bytes != state.formats.moved_bytes:
        yield f"rows by format are {tally.n_rows}, counted {state.formats.n_rows}"
    sql = "SELECT coalesce(sum(bytes), 0) FROM files WHERE fingerprint != ?"
    ((foreign,),) = state.catalog.rows(sql, (state.identity.row_identity,))
    if foreign != state.foreign_bytes:
        yield f"files of other models have {foreign} bytes, counted {state.foreign_bytes}"


def _file_problems(state: StoreState) -> Iterator[str]:
    size_of = state.directory.files.disk_size
    for file in state.files.values():
        viewers = state.tree.viewers(file)
        if not viewers or any(node.file is not file for node in viewers):
            yield f"{file} is viewed by {viewers}"
        if not file.path.is_file() or file.path.stat().st_size != size_of(file.nbytes):
            yield f"{file} is missing or has another size"


def _catalog_problems(state: StoreState, nodes: list[Node]) -> Iterator[str]:
    mine = {node.id: _row(node) for node in nodes}
    stored = {
        row[0]: row[1:]
        for row in state.catalog.rows(
            "SELECT id, coalesce(parent, 0), scope, p0, p1, v.file, coalesce(v.row0, 0), ids"
            " FROM segments LEFT JOIN (SELECT node, file, row0 FROM views JOIN files"
            " ON files.id = file WHERE fingerprint = ?) AS v ON v.node = segments.id"
            " WHERE tokenizer = ?",
            (state.identity.row_identity, state.identity.tokenizer),
        )
    }
    for id in mine.keys() | stored.keys():
        if mine.get(id) != stored.get(id):
            yield f"segment {id} differs between prefix tree and catalog"
    files = {
        file.id: (file.path.name, file.p0, file.n_rows, file.nbytes, file.runs)
        for file in state.files.values()
    }
    rows = state.catalog.rows(
        "SELECT id, name, p0, n_rows, bytes, runs FROM files WHERE fingerprint = ?",
        (state.identity.row_identity,),
    )
    if {row[0]: (*row[1:5], decode_runs(row[5], row[3])) for row in rows} != files:
        yield "the files in memory and in the catalog differ"
    for id, name in state.catalog.rows(_LOST):
        yield f"turn {id} of session {name!r} has no tokens, and the session is not frozen"
    yield from state.catalog.problems()


def _row(node: Node) -> tuple[Any, ...]:
    assert node.parent is not None
    file_id = None if node.file is None else node.file.id
    return (
        node.parent.id,
        node.scope,
        node.p0,
        node.p1,
        file_id,
        node.file_row0,
        node.ids,
    )


def _pin_problems(state: StoreState, nodes: list[Node]) -> Iterator[str]:
    pins: Counter[int] = Counter()
    for (id,) in state.catalog.rows("SELECT node FROM pins UNION ALL SELECT node FROM bases"):
        node = state.tree.nodes.get(id)
        for each in node.path() if node is not None else ():
            pins[each.id] += 1
    for node in nodes:
        if node.pins != pins[node.id]:
            yield f"{node} counts {node.pins} pins, has {pins[node.id]}"


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
    media: MediaTable,
    pool: Executor,
    progress: Callable[[int, int], None] | None,
    *,
    repair: bool,
) -> VerifyReport:
    """Check the invariants, then every file of every row identity and every frozen session."""
    with state.catalog.paused(), state.lock:
        found = problems(state, keys=True) + state.catalog.journal_problems()
        n_orphans = len(orphans(state)) + len(stray_checkpoints(state)) + len(media.orphans())
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
    found += _basis_problems(state, rows)
    for row in files:
        problem = _file_problem(state, rows, pool, row)
        if problem is not None and not _is_catalogued(state, row[1]):
            continue  # dropped since the list was made
        if problem is not None:
            found.append(f"{row[1]}: {problem}")
            n_set_aside += repair and _set_aside(state, rows, row[1])
        elif _is_head_damaged(state, pool, row):
            found.append(f"{row[1]}: the rows of its head are damaged, which costs drafts alone")
            if repair:
                _write_without_head(state, rows, row[1])
        done += row[3]
        if progress is not None:
            progress(done, total)
    for path, size in states:
        problem = checkpoint_problem(state.directory.files, path)
        if problem is not None:
            found.append(f"{path.name}: {problem}")
            n_set_aside += repair and state.directory.set_aside(path)
        done += size
        if progress is not None:
            progress(done, total)
    damaged_media, n_media = media.check(repair=repair)
    found += [*cold.damaged(), *damaged_media]
    if repair:
        found += _repair(state.catalog)
    return VerifyReport(
        n_segments,
        len(files) + len(states),
        done,
        n_sessions,
        n_set_aside + n_media,
        len(states),
        n_orphans,
        tuple(found),
        cold.stats()["frozen_sessions"],
        tuple(state.catalog.recovered),
    )


def _repair(catalog: Catalog) -> list[str]:
    """Repair catalog and journal; returns the problems that remain."""
    try:
        catalog.repair()
    except CatalogDamaged:
        return [
            "catalog: its journal is not whole either; restart towerd to recover what both have"
        ]
    return []


def _basis_problems(state: StoreState, rows: RowStore) -> Iterator[str]:
    """What is wrong with the bases of transform-coded rows; a lost one is told by the files that it coded."""
    with state.lock:
        needed = needed_bases(state.catalog)
    for name in sorted(rows.bases.names()):
        try:
            problem = rows.bases.problem(name)
        except OSError as error:
            problem = str(error)
        if problem is not None:
            yield problem if name in needed else f"{problem}; nothing needs it"


def _file_problem(
    state: StoreState, rows: RowStore, pool: Executor, row: tuple[Any, ...]
) -> str | None:
    id, name, p0, n_bytes, n_rows, text, runs = row
    try:
        row_identity = RowIdentity.from_json(msgspec.json.decode(text))
        with state.lock:
            views = state.catalog.rows(
                "SELECT p0, ids, node, scope FROM views JOIN segments ON segments.id = node"
                " WHERE file = ? ORDER BY p1",
                (id,),
            )
            if not views:
                return "no segment views it"
            prefix = prefix_of(state, views[-1][2])
        data = state.directory.files.map(state.directory.segments / name, n_bytes)
        header, start = head_of(data)
        if (header.p0, header.n, header.run_table) != (p0, n_rows, decode_runs(runs, n_rows)):
            return "the catalog describes another file under this name"
        check_layout(header, row_identity.layout)
        scopes = readable_scopes(view[3] for view in views)
        check_claim(header, Claim(row_identity, scopes, prefix, [view[:2] for view in views]))
        check_pieces(data, header.pieces, start, pool)
        _check_blobs(data, header, start, row_identity)
        check_coded(data, header, start, rows.bases)
    except NewerVersion as error:
        return str(error)
    except (StateError, OSError, msgspec.DecodeError) as error:
        return str(error)
    return None


def _is_head_damaged(state: StoreState, pool: Executor, row: tuple[Any, ...]) -> bool:
    """Of a file without a problem, or one that is gone."""
    try:
        data = state.directory.files.map(state.directory.segments / row[1], row[3])
        header, start = head_of(data)
        if header.head is not None:
            check_pieces(data, header.head.planes, start, pool)
    except OSError:
        return False
    except StateError:
        return True
    return False


def _check_blobs(
    data: FileMap, header: SegmentHeader, start: int, row_identity: RowIdentity
) -> None:
    """Raises StateError unless every blob can be read."""
    for run in header.runs:
        at = header.p0 + run.row0
        for blob in run.blobs:
            taken = data.view(start + blob.offset, blob.nbytes)
            blob_rows(taken, blob, row_identity.layout, at)
            at += blob.n_rows


def _is_catalogued(state: StoreState, name: str) -> bool:
    """Whether a file is there still; its id may be that of another one by now."""
    with state.lock:
        return bool(state.catalog.rows("SELECT 1 FROM files WHERE name = ?", (name,)))


def _named(state: StoreState, name: str) -> SegmentFile | None:
    """The file of this name, of the open row identity."""
    return next((each for each in state.files.values() if each.path.name == name), None)


def _set_aside(state: StoreState, rows: RowStore, name: str) -> bool:
    """Quarantine a file of the open row identity; other files are handled when their
    row identity is opened. If only transform-coded rows are damaged, the others are written again."""
    with state.lock:
        file = _named(state, name)
        nodes = [] if file is None else list(state.tree.viewers(file))
    if file is not None and nodes:
        try:
            rows.verify(file, max(nodes, key=lambda node: node.p1))
        except RowsDamaged:
            return True
        except StoreError:
            return False
    return file is not None and rows.drop_file(file, set_aside=True) > 0


def _write_without_head(state: StoreState, rows: RowStore, name: str) -> None:
    """Replace a file by one with its good rows."""
    with state.lock:
        file = _named(state, name)
    if file is not None:
        rows.reencode(file, ())
