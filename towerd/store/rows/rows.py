"""Rows of segments: planning, loading, caching in memory, writing, and encoding files again in other formats."""

from __future__ import annotations

import errno
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from towerd.codec.errors import NewerVersion
from towerd.codec.rows.basis import Basis
from towerd.errors import DiskFull, RowsDamaged, SegmentsGone, StoreError
from towerd.slots.errors import StateError
from towerd.slots.rows import KVRows
from towerd.slots.runs import Runs
from towerd.store.files import durable
from towerd.store.files.writes import Kind
from towerd.store.rows.drafting import as_split, consecutive, covered, draft_of, merge_runs
from towerd.store.rows.format_request import FormatRequest, format_of
from towerd.store.rows.recoding import UnfinishedCodings, carried_runs, encoded_run
from towerd.store.rows.replaced import FileTest, ReplacedFiles
from towerd.store.rows.rows_part import RowsPart
from towerd.store.rows.uncatalogue import uncatalogue, uncatalogue_forgotten
from towerd.store.segments.coded_format import coding_of, is_coded
from towerd.store.segments.segment_file import ANY_HEAD, Claim, Ranges, RowsLost, SegmentFile
from towerd.store.segments.segment_header import FormatRun, encode_runs, segment_key, worst_of
from towerd.store.segments.segment_writer import Draft, DraftRun, new_name, write_segment
from towerd.store.segments.transform_bases import BasisLost, TransformBases
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.store.tree.scope import readable_scopes
from towerd.system.paced import PacedExecutor
from towerd.tokens import ID_BYTES, Provenance, may_replace, provenance_as_kept

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES})


class RowStore:
    """The row side of a store; `state` and its lock are shared with the rest of it."""

    def __init__(self, state: StoreState, pool: Executor) -> None:
        self._state = state
        self._pool = pool
        self.encoding = PacedExecutor()
        """Encodes rows again, where no request waits for it."""
        self.is_trusted = True
        """Whether rows belong to the loaded weights; see `distrust`."""
        self.head: bytes | None = None
        """The digest of the head whose rows are read beside the model's; None: there is no head."""
        self.bases = TransformBases(
            state.directory.bases,
            state.directory.tmp,
            state.directory.files,
            state.catalog.being_written,
        )
        """What transform-coded rows are written and read with."""
        self._unfinished = UnfinishedCodings()
        self.replaced = ReplacedFiles(state)
        """Files that may go once the journal names those that have their rows."""

    def distrust(self, since: float) -> None:
        """Drop and refuse rows until the store is reopened, because the weights changed after
        `since` (Unix time). Rows in memory and files made since then are removed; tokens
        stay."""
        state = self._state
        with state.lock:
            self.is_trusted = False
            for node in state.tree.nodes.values():
                self.drop_hot(node)
            made_since = state.catalog.rows("SELECT id FROM files WHERE created >= ?", (since,))
            files = [state.files[id] for (id,) in made_since if id in state.files]
        for file in files:
            self.drop_file(file)

    def plan(
        self, nodes: Sequence[Node], start: int, stop: int, worst: Provenance
    ) -> list[RowsPart]:
        """The rows of [start, stop) along a path, up to the first token without any. Those of a
        provenance beyond `worst` count as none."""
        parts: list[RowsPart] = []
        if not self.is_trusted:
            return parts
        at, takes_all = start, worst >= Provenance.AFTER_MOVED
        for node in nodes:
            if node.p1 <= at or at >= stop:
                continue
            end = min(node.p1, stop)
            if node.hot is not None and (takes_all or _is_within(node.worst_hot, worst)):
                parts.append(RowsPart(node, at, end, "hot", node.hot, node.origin))
            elif node.file is not None and (takes_all or _is_within(node.worst_file, worst)):
                parts.append(RowsPart(node, at, end, "warm", node.file))
            else:
                break
            at = end
        return parts

    def load(self, part: RowsPart) -> Runs:
        """A part's rows as views, in the formats they are stored in, checked on their first use in
        this process. Raises RowsDamaged (the file went to quarantine, or was dropped since
        planning: plan again) or StoreError (too few descriptors or too little memory to open it)."""
        return Runs(tuple(self.load_each(part)))

    def load_each(self, part: RowsPart) -> Iterator[KVRows]:
        """The rows piece by piece, each checked when requested; raises as `load`. Pieces
        already taken stay valid."""
        self._state.check_open()
        if not self.is_trusted:
            raise RowsDamaged("the model's file was changed, so rows are not used")
        if isinstance(part.source, Runs):
            yield from part.source.slice(part.p0, part.p1).settled()
            return
        at, file = part.p0, part.source
        while at < part.p1:
            file = _newest(file, part)
            if file.is_decoded(at, part.p1) and not part.source.is_decoded(at, part.p1):
                raise RowsDamaged(f"the rows in {file.path.name} are not as exact as was planned")
            try:
                for rows in self._load(file, part, at):
                    at = rows.p1
                    yield rows
            except RowsDamaged:
                if _newest(file, part) is file:  # else it was re-encoded just now
                    raise

    def _load(self, file: SegmentFile, part: RowsPart, p0: int) -> Iterator[KVRows]:
        self._open(file, part.node)
        try:
            layout = self._state.row_identity.layout
            each = file.rows(layout, p0, part.p1, self._pool, self.head, bases=self.bases)
            for rows in each:
                # the segment may have been cut here since, where another branch begins
                yield rows.settled() if rows.p1 == part.p1 else rows
        except RowsLost as error:
            raise self._lost(file, error) from error
        except NewerVersion as error:
            raise StoreError(f"{file.path} cannot be read: {error}") from error
        except (StateError, OSError) as error:
            raise self._damaged(file, error) from error

    def attach_hot(
        self,
        nodes: Sequence[Node],
        rows: KVRows | Runs,
        *,
        origin: Provenance = Provenance.EXACT,
    ) -> list[Node]:
        """Give every node of the path that ends with `nodes` and lies within `rows` its slice;
        returns the nodes that took it. A node that is hot already keeps what it has, unless
        `may_replace` prefers `rows`; one with a better file takes nothing. `origin`: what the rows
        were computed as. Raises StateError for rows of another layout."""
        state, rows = self._state, Runs.of(rows)
        if not rows.fits(state.row_identity.layout):
            raise StateError("these rows have another layout than the store's")
        new, taken = provenance_as_kept(origin, is_native=rows.is_native), []
        with state.lock:
            for node in covered(nodes, rows.p0, rows.p1) if self.is_trusted else ():
                hot, on_disk = node.worst_hot, node.worst_file
                if hot is not None and not may_replace(new, hot):
                    continue
                if on_disk is not None and may_replace(on_disk, new):
                    continue
                n_before = 0 if node.hot is None else node.hot.nbytes
                # what stands behind a node differs by branch, and may be another tenant's
                node.hot, node.origin = rows.slice(node.p0, node.p1).settled(), origin
                state.hot_bytes += node.hot.nbytes - n_before
                taken.append(node)
            state.listener.became_hot(taken)
        return taken

    def unshare(self, node: Node) -> None:
        """Copy a node's rows in memory out of buffers shared with other nodes."""
        rows = node.hot
        copy = None if rows is None else rows.copy()
        with self._state.lock:
            if node.hot is rows:  # otherwise it was split or released meanwhile
                node.hot = copy

    def drop_hot(self, node: Node) -> int:
        """Release a node's rows in memory; returns their bytes."""
        state = self._state
        with state.lock:
            if node.hot is None:
                return 0
            n_bytes = node.hot.nbytes
            node.hot = None
            state.hot_bytes -= n_bytes
            state.listener.left_hot(node)
        return n_bytes

    def write(
        self,
        nodes: Sequence[Node],
        *,
        sufficient: Provenance = Provenance.APPROXIMATE,
        requests: Sequence[FormatRequest] = (),
        pause: Callable[[], object] = lambda: None,
    ) -> SegmentFile:
        """Write consecutive hot nodes of one path and scope into one file; durable. Nodes that
        have a file keep it, unless its rows are worse than `sufficient` and `may_replace` prefers
        those in memory. If all keep theirs, the last one's is returned. Nodes that splits have made
        of them are also written. requests: the formats to write native rows in; others stay as they
        are. pause: see `reencode`

        Raises SegmentsGone (they were removed meanwhile), DiskFull (nothing is left behind) or
        StoreError (not hot, not consecutive); ValueError for rows that cannot be coded."""
        state = self._state
        state.check_open()

        with state.lock:
            nodes = as_split(nodes)
            if nodes and not any(
                lacks(node.worst_file, node.worst_hot, sufficient) for node in nodes
            ):
                assert nodes[-1].file is not None
                return nodes[-1].file
            draft = draft_of(nodes, state, requests)
        rows = draft.key, draft.p0, *(run.origin for run in draft.runs)
        draft = self._coded(draft, rows, pause)

        def targets() -> list[Node]:
            found, runs = [], draft.run_table
            for node in covered(nodes, draft.p0, draft.p1):
                new = worst_of(runs, node.p0 - draft.p0, node.p1 - draft.p0)
                if lacks(node.worst_file, new, sufficient):
                    found.append(node)
            return found

        file = self.write_draft(draft, targets)
        if file is None:
            raise SegmentsGone("the segments were removed while their rows were written")
        self._unfinished.forget(rows)
        return file

    def _coded(self, draft: Draft, rows: Hashable, pause: Callable[[], object]) -> Draft:
        """The draft of rows in memory with those encoded that are to be transform-coded; rows: what tells
        them from others. Raises StoreError; ValueError for rows that cannot be coded."""
        if not any(is_coded(run.format) for run in draft.runs):
            return draft
        self.encoding.begin()
        try:
            runs = [
                self._encoded(run, rows, pause) if is_coded(run.format) else run
                for run in draft.runs
            ]
        except (OSError, StateError, NewerVersion) as error:
            raise StoreError(f"rows cannot be transform-coded: {error}") from error
        return replace(draft, runs=runs)

    def _encoded(self, run: DraftRun, file: Hashable, pause: Callable[[], object]) -> DraftRun:
        """The run of these rows of a file in the transform coding that is its format. Raises as
        `_basis_to_write` and `encoded_run`."""
        coding, name = coding_of(run.format)
        basis = self._basis_to_write(name)
        done = self._unfinished.of(file, (run.p0, run.p1, run.format))
        how = basis, coding, pause, done, self.encoding
        return encoded_run(run.parts, run.format, run.origin, *how)

    def write_draft(
        self,
        draft: Draft,
        targets: Callable[[], Sequence[Node]],
        kind: Kind = "rows",
        *,
        is_paced: bool = False,
    ) -> SegmentFile | None:
        """Write a draft, counted as `kind`, and let `targets()` (called under the lock once it is on disk) view it;
        files that lose their last viewer are deleted (`ReplacedFiles`). None if there are no targets. is_paced: wait
        while requests run. Raises DiskFull or StoreError. In both cases nothing is left behind."""
        state, name = self._state, new_name()
        pool = self.encoding if is_paced else self._pool
        pause = self.encoding.pause if is_paced else _go_on
        directory = state.directory
        with state.catalog.being_written(name):  # gc must not delete it
            with durable.store_errors("rows cannot be written"):
                folders = directory.tmp, directory.segments
                n_bytes = write_segment(directory.files, draft, name, *folders, pool, pause)
            directory.writes.add(kind, n_bytes)
            file: SegmentFile | None = None
            unviewed: list[SegmentFile] = []
            try:
                with state.lock:
                    if nodes := targets():
                        of = draft.p0, draft.p1 - draft.p0, draft.run_table
                        file, unviewed = adopt(state, nodes, of, name, n_bytes)
            finally:
                if file is None:
                    directory.remove(name)
        self.replaced.add(unviewed)
        return file

    def reencode(
        self,
        file: SegmentFile,
        requests: Sequence[FormatRequest],
        pause: Callable[[], object] = lambda: None,
    ) -> SegmentFile | None:
        """Replace `file` durably by one with its rows in the formats of `requests`: the native ones, and
        those in a stored format where the request says so. Others stay as they are.

        pause: called before transform coding and every few milliseconds of it, returns if it may continue or
            raises CodingInterrupted, which this then raises; what was encoded is used at the next attempt

        The old file's checksums are verified again first. Its nodes switch in one transaction, then
        it is deleted (`ReplacedFiles`); loads planned from it use the new file. None if the file was dropped meanwhile.
        Raises RowsDamaged (the old file is in quarantine), DiskFull or StoreError."""
        state = self._state
        state.check_open()
        with state.lock:
            nodes = sorted(state.tree.viewers(file), key=lambda node: node.p0)
            if file.dropped or not nodes:
                return None
            p0, last, prefix = nodes[0].p0, nodes[-1], nodes[-1].prefix_bytes()
        if any(is_coded(request.format) for request in requests):
            pause()  # rather than read a file first, again and again while a request runs
        self.encoding.begin()
        self.verify(file, last, self.encoding)
        draft = self.draft_again(file, last, prefix, p0, requests, pause)

        def targets() -> list[Node]:
            return [] if file.dropped else list(state.tree.viewers(file))

        new = self.write_draft(draft, targets, "reencoded", is_paced=True)
        self._unfinished.forget(file.path)
        return new

    def draft_again(
        self,
        file: SegmentFile,
        last: Node,
        prefix: bytes,
        p0: int,
        requests: Sequence[FormatRequest] = (),
        pause: Callable[[], object] = lambda: None,
    ) -> Draft:
        """The rows of a checked file from p0 on up to the end of `prefix`, which is that of the node `last`, in
        the formats requested. Raises StoreError; ValueError for rows that cannot be coded."""
        state, p1 = self._state, len(prefix) // ID_BYTES
        try:
            runs = self._stretches(file, requests, p0, p1, pause)
        except (OSError, StateError, NewerVersion) as error:
            raise StoreError(f"{file.path} cannot be read again: {error}") from error
        return Draft(
            state.digest,
            segment_key(state.digest, last.scope, prefix),
            last.scope,
            prefix[p0 * ID_BYTES :],
            state.row_identity.layout,
            runs,
        )

    def _stretches(
        self,
        file: SegmentFile,
        requests: Sequence[FormatRequest],
        p0: int,
        p1: int,
        pause: Callable[[], object],
    ) -> list[DraftRun]:
        """The runs to write: stretches with one origin and one requested format, joined where
        neighbours have the same format. What is transform-coded is not cut, since a page that is cut is
        native from then on."""
        native = self._state.row_identity.layout
        coded = [run for run in file.runs if is_coded(run.format)]
        whole = [(file.p0 + run.row0, file.p0 + run.end) for run in coded]
        asked = {p for request in requests for p in (request.p0, request.p1)}
        cuts = {p for p in asked if not any(start < p < end for start, end in whole)}
        cuts |= {file.p0 + run.row0 for run in file.runs}
        ends = [p0, *sorted(p for p in cuts if p0 < p < p1), p1]
        runs: list[DraftRun] = []
        for start, end in pairwise(ends):
            before = next(run for run in file.runs if start - file.p0 < run.end)
            if is_coded(before.format):
                found = file.carried(start, end, self.bases)
                runs += carried_runs(found, before.format, before.origin, file.head_rows)
                continue
            parts = self.pieces(file, start, end)
            name = format_of(start, before, requests, native)
            run = DraftRun(parts, name, before.origin)
            runs.append(self._encoded(run, file.path, pause) if is_coded(name) else run)
        return merge_runs(runs)

    def _basis_to_write(self, name: str) -> Basis:
        """The basis of this name, which gc leaves alone until what is written names it. Raises ValueError if
        it is lost, so that rows stay as they are; OSError; NewerVersion."""
        try:
            basis = self.bases.get(name, self._state.digest)
            self.bases.touch(name)
        except (BasisLost, FileNotFoundError) as error:
            raise ValueError(f"rows cannot be coded: {error}") from error
        return basis

    def _lost(self, file: SegmentFile, error: RowsLost) -> StoreError:
        """Give up the transform-coded rows that cannot be read, and write the others of the file again;
        returns the error to raise."""
        with self._state.lock:
            nodes = sorted(self._state.tree.viewers(file), key=lambda node: node.p0)
        if file.dropped or not nodes:
            return RowsDamaged(f"the rows in {file.path.name} were dropped meanwhile")
        try:
            self._write_without(file, self._all_lost(file, nodes[-1]) or error.ranges)
        except DiskFull as full:
            return full  # it is tried again at the next reading
        except (StateError, OSError, StoreError) as worse:  # nothing of it can be kept
            return self._damaged(file, error if isinstance(worse, StoreError) else worse)
        return RowsDamaged(f"rows in {file.path.name} are damaged and set aside: {error}")

    def _all_lost(self, file: SegmentFile, node: Node) -> Ranges:
        """All positions of a file whose transform-coded rows cannot be read. Raises StateError, OSError."""
        try:
            file.verify(self._claim(file, node), self._pool, self.bases)
        except RowsLost as error:
            return error.ranges
        return []

    def _write_without(self, file: SegmentFile, lost: Ranges) -> None:
        """Replace a file by files with its rows but for those at the positions `lost`, which is set aside. The
        segments that have some of those are cut there. Raises StoreError."""
        state = self._state
        with state.locked():
            for node in list(state.tree.viewers(file)):
                inside = {p for each in lost for p in each if node.p0 < p < node.p1}
                if inside:
                    with state.growing() as growth:
                        growth.grow(node.prefix_bytes(), node.scope, [*sorted(inside), node.p1])
            nodes = sorted(state.tree.viewers(file), key=lambda node: node.p0)
        good = [node for node in nodes if not any(a < node.p1 and node.p0 < b for a, b in lost)]
        for run in consecutive(good):
            p0, last = run[0].p0, run[-1]
            with state.locked():
                prefix = last.prefix_bytes()
            draft = self.draft_again(file, last, prefix, p0)

            def targets(draft: Draft = draft) -> list[Node]:
                found = [] if file.dropped else state.tree.viewers(file)
                return [node for node in found if draft.p0 <= node.p0 and node.p1 <= draft.p1]

            self.write_draft(draft, targets, "reencoded")
        self.drop_file(file, set_aside=True)

    def drop_file(
        self, file: SegmentFile, *, set_aside: bool = False, may: FileTest | None = None
    ) -> int:
        """Forget a file: its nodes keep their tokens only. Deletes it, or moves it into quarantine; returns the
        bytes it had. Nothing happens if it is gone already, or `may` says no under the lock."""
        state = self._state
        with state.locked():
            if file.dropped or (may is not None and not may(file)):
                return 0
            try:
                uncatalogue(state.catalog, file.id)
            except DiskFull:
                # deleting must work most of all now; a catalogued file that is missing is
                # forgotten at the next opening, so the order does not matter
                state.directory.remove(file.path.name)
                with suppress(DiskFull):
                    uncatalogue(state.catalog, file.id)
            state.forget_file(file)
        if set_aside:
            state.directory.set_aside(file.path)
        else:
            state.directory.remove(file.path.name)
        return file.nbytes

    def drop_missing(self) -> None:
        """Forget files that were deleted while no store was open, and those that no node views: a power cut may bring back
        a file whose deletion was not synced."""
        names, tree = self._state.directory.names(), self._state.tree
        for file in list(self._state.files.values()):
            if file.path.name not in names or not tree.viewers(file):
                self.drop_file(file)

    def verify(self, file: SegmentFile, node: Node, pool: Executor | None = None) -> None:
        """Check all of a file that `node` views, even if checked before; raises as `load`. pool: the
        threads to use; None: those that requests use."""
        self._refuse_dropped(file)
        try:
            file.verify(self._claim(file, node), pool or self._pool, self.bases)
        except RowsLost as error:
            raise self._lost(file, error) from error
        except NewerVersion as error:
            raise StoreError(f"{file.path} cannot be read: {error}") from error
        except (StateError, OSError) as error:
            raise self._damaged(file, error) from error

    def pieces(self, file: SegmentFile, p0: int, p1: int) -> list[KVRows]:
        """The rows [p0, p1) of a file that was verified, with those of any head. Raises OSError or
        StateError."""
        layout = self._state.row_identity.layout
        return list(file.rows(layout, p0, p1, self._pool, ANY_HEAD, bases=self.bases))

    def _open(self, file: SegmentFile, node: Node) -> None:
        self._refuse_dropped(file)
        if file.is_open:
            return
        try:
            file.open(self._claim(file, node))
        except (StateError, OSError) as error:
            raise self._damaged(file, error) from error

    def _refuse_dropped(self, file: SegmentFile) -> None:
        if file.dropped:
            raise RowsDamaged(f"the rows in {file.path.name} were dropped meanwhile")

    def _claim(self, file: SegmentFile, node: Node) -> Claim:
        with self._state.lock:
            viewers = self._state.tree.viewers(file)
            views = [(viewer.p0, viewer.ids) for viewer in viewers]
            scopes = readable_scopes(viewer.scope for viewer in viewers)
            return Claim(self._state.row_identity, scopes, node.prefix_bytes(), views)

    def _damaged(self, file: SegmentFile, error: Exception) -> StoreError:
        """Quarantine `file` and return the error to raise."""
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES:
            return StoreError(f"{file.path} cannot be opened: {error.strerror}")
        if file.dropped:
            return RowsDamaged(f"the rows in {file.path.name} were dropped meanwhile")
        try:
            self.drop_file(file, set_aside=True)
        except StoreError:
            with self._state.lock:  # the catalog cannot be written now; forget it here at least
                self._state.forget_file(file)
        return RowsDamaged(f"rows in {file.path.name} are damaged and set aside: {error}")


def _go_on() -> None:
    """What a request waits for does not pause."""


def lacks(stored: Provenance | None, new: Provenance | None, sufficient: Provenance) -> bool:
    """Whether rows whose worst provenance is `new` are wanted where those of `stored` are: there are
    none, or they are worse than `sufficient` and `new` is better. None: no rows."""
    if stored is None:
        return True
    return new is not None and stored > sufficient and may_replace(new, stored)


def _is_within(provenance: Provenance | None, worst: Provenance) -> bool:
    return provenance is not None and provenance <= worst


def adopt(
    state: StoreState,
    nodes: Sequence[Node],
    of: tuple[int, int, tuple[FormatRun, ...]],
    name: str,
    n_bytes: int,
) -> tuple[SegmentFile, list[SegmentFile]]:
    """Enter a written file in the catalog as the one that `nodes` view, in one transaction;
    returns it and the files that lost their last view, which are forgotten. Under the lock.

    of: its first position, its rows and their runs"""
    p0, n_rows, runs = of
    before = {node.file.id: node.file for node in nodes if node.file is not None}
    viewers = state.tree.viewers
    unviewed = [old for old in before.values() if all(node in nodes for node in viewers(old))]
    with state.catalog.transaction():
        uncatalogue_forgotten(state, nodes)
        id = state.catalog.insert(
            "files",
            fingerprint=state.identity.row_identity,
            name=name,
            p0=p0,
            n_rows=n_rows,
            bytes=n_bytes,
            created=state.clock(),
            runs=encode_runs(runs),
        )
        state.catalog.run_many(
            "DELETE FROM views WHERE node = ? AND file = ?",
            [(node.id, node.file.id) for node in nodes if node.file is not None],
        )
        state.catalog.run_many(
            "INSERT INTO views(node, file, row0) VALUES (?, ?, ?)",
            [(node.id, id, node.p0 - p0) for node in nodes],
        )
        state.catalog.run_many("DELETE FROM files WHERE id = ?", [(old.id,) for old in unviewed])
    path = state.directory.segments / name
    file = SegmentFile(id, path, p0, n_rows, n_bytes, runs, state.directory.files)
    for node in nodes:
        state.tree.view(node, file, node.p0 - p0)
    state.files[id] = file
    state.warm_bytes += n_bytes
    state.formats.add(file)
    for old in unviewed:
        old.successor = file
        state.forget_file(old)
    state.listener.became_warm(file, nodes)
    return file, unviewed


def _newest(file: SegmentFile, part: RowsPart) -> SegmentFile:
    """The file that currently holds a planned part's rows."""
    while file.dropped and file.successor is not None:
        after = file.successor
        if not after.p0 <= part.p0 < part.p1 <= after.p0 + after.n_rows:
            break
        file = after
    return file
