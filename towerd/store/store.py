"""Store: every segment, session and base of one model, durable, behind one lock."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from towerd.errors import StoreError
from towerd.slots.row_identity import RowIdentity
from towerd.store.catalog.catalog import Catalog
from towerd.store.catalog.identity import ModelIdentity
from towerd.store.catalog.owner import own_store
from towerd.store.catalog.shared.remote import RemoteCatalog
from towerd.store.catalog.vocabularies import Vocabularies
from towerd.store.encryption.opening import shared_directory
from towerd.store.files import durable
from towerd.store.files.disk_limit import DiskLimit
from towerd.store.files.writes import DailyWrites
from towerd.store.maintenance.erase import erase
from towerd.store.maintenance.footprint import Footprint, session_footprints, total_footprint
from towerd.store.maintenance.replica import Replica
from towerd.store.maintenance.space import TierCost, tier_cost
from towerd.store.maintenance.verify import VerifyReport, problems, verify
from towerd.store.rows.collect import GcReport, collect
from towerd.store.rows.exchange import take_in, take_out
from towerd.store.rows.rows import RowStore
from towerd.store.rows.rows_part import RowsPart
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_header import SegmentHeader
from towerd.store.sessions.bases import BaseTable, PinTable
from towerd.store.sessions.cold import ColdTable
from towerd.store.sessions.conversations import ResponseContext
from towerd.store.sessions.deletions import Deletions, DeletionWatch
from towerd.store.sessions.foreign import ForeignSessions
from towerd.store.sessions.history import History, add_history, copy_history
from towerd.store.sessions.media import KeptMedium, MediaTable, enter_media
from towerd.store.sessions.responses import NewResponse, ResponseTable
from towerd.store.sessions.sessions import SessionTable, session_page
from towerd.store.sessions.turn import SessionInfo, Turn, TurnInfo, TurnResult
from towerd.store.state.state import Held, StoreState, load_state
from towerd.store.tree.handle import Handle
from towerd.store.tree.node import Node
from towerd.store.tree.run_index import RUN_TOKENS, RunIndex, StoredRun
from towerd.store.tree.tree import Listener, Match
from towerd.tokens import ID_BYTES, Ids, Provenance, ids_array, ids_bytes, path_bytes

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

WORKERS_MAX = 4
SESSIONS_MAX = 1_000_000
_COUNTED_AT_ONCE = 1000
_COUNT_PAUSES = 20
_COUNT_QUICK_S = 0.01
_ENTERING_PAUSE_S = 0.002
"""How long the thread that builds the index of runs leaves the lock to others at each step."""


def _has_rows(node: Node) -> bool:
    return node.has_rows


WhichModel: TypeAlias = (
    RowIdentity | ModelIdentity | Callable[[Catalog], RowIdentity | ModelIdentity]
)
"""A row identity, alone or with what is known of the tokenizer, or a function that finds it in the
opened catalog."""


class Store:
    """Synchronous and thread-safe. Every change is durable when its method returns, except
    uses (`touch`), which are flushed in batches."""

    def __init__(self, state: StoreState, closing: ExitStack, vault: Vault | None) -> None:
        """Use `Store.open`. closing: closes the catalog."""
        self.vault = vault
        """The keys of an encrypted store."""
        self.state = state
        self._closing = closing
        self._pool = ThreadPoolExecutor(min(WORKERS_MAX, os.cpu_count() or 1), "store")
        self.rows = RowStore(state, self._pool)
        self.run_index = RunIndex(state.tree)
        self._is_entering = False
        """Whether the thread runs that builds the index of runs."""
        self._sessions = SessionTable(state.catalog, state.identity.tokenizer)
        self._counted: Mapping[int, int] = {}
        self._count_due = 0.0
        """time.monotonic() at which sessions are counted again for `footprints`."""
        self.bases = BaseTable(state)
        self.pins = PinTable(state)
        self.deletions = Deletions()
        self.responses = ResponseTable(
            state.catalog, state.locked, state.clock, state.directory.limit
        )
        """The responses of OpenAI's API, and its conversations."""
        self.media = MediaTable(state)
        self.vocabularies = Vocabularies(state.directory.tokenizers, state.directory.files)
        """The vocabularies of the tokenizers whose sessions the store has."""
        self.foreign = ForeignSessions(state, self.deletions, self.media)
        """The sessions of other tokenizers."""
        self.cold = ColdTable(state, self._sessions, self.bases)
        replica = Replica(state, self.bases, self.cold, self.deletions)
        state.catalog.follow(replica.apply, state.tree.held_ids)

    @classmethod
    def open(
        cls,
        root: Path,
        model: WhichModel,
        *,
        clock: Callable[[], float] = time.time,
        catalog_fd: int | None = None,
        encrypt: str | None = None,
    ) -> Store:
        """Open the store in `root` for one model; created if it is missing. Its sessions are
        those of every model with this tokenizer; its rows are those of the row identity.
        catalog_fd: a socket of the process that has the store's catalog (`CatalogBroker`). encrypt: the source of the
        key of a store that is encrypted or is to be (`KeySource`).

        Raises StoreLocked, StoreVersion, DiskFull, or StoreError (unwritable, damaged)."""
        closing = ExitStack()
        try:
            with durable.store_errors(f"the store {root} cannot be opened"):
                catalog: Catalog
                if catalog_fd is None:
                    owned = own_store(Path(root), clock, encrypt, closing)
                    directory, vault, catalog = owned.directory, owned.vault, owned.catalog
                else:
                    directory, vault = shared_directory(Path(root), clock, closing)
                    catalog = RemoteCatalog(catalog_fd)
                    closing.callback(catalog.close)
                identity = _identify(model, catalog)
                with catalog.lock:
                    state = load_state(directory, catalog, identity, clock)
                    store = cls(state, closing, vault)
            store.rows.drop_missing()
        except BaseException:
            closing.close()
            raise
        return store

    def close(self) -> None:
        """Flush uses, close the catalog, release the lock. Rows in use stay readable."""
        try:
            with self.state.catalog.paused(), self.state.lock:
                if self.state.is_open:
                    self.state.is_open = False
                    try:
                        self.state.flush()
                    finally:
                        self._release()
        finally:
            self._release()  # also if the lock could not be had: its broker is gone

    def _release(self) -> None:
        """Release what the store has open, once."""
        self.rows.encoding.shutdown()
        self._pool.shutdown()
        self._closing.close()

    def listen(self, listener: Listener) -> None:
        """Report every later change to `listener`, which replaces any other listener."""
        with self.state.locked():
            self.state.listener = listener

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- tokens ---------------------------------------------------------------------------

    def match(self, ids: Ids, scope: str) -> Match:
        """The longest stored prefix of `ids` among the scope's own and public segments."""
        with self.state.locked():
            return self.state.tree.match(ids_bytes(ids), scope)

    def hold(self, ids: Ids, scope: str) -> Handle:
        """The path of a request with these tokens, to be released when the request ends."""
        return Handle(self.state.tree, self.state.locked, ids, scope)

    def runs(
        self,
        ids: Ids,
        scope: str,
        start: int,
        stop: int,
        n_min: int = RUN_TOKENS,
        usable: Callable[[Node], bool] = _has_rows,
    ) -> list[StoredRun]:
        """Runs of at least `n_min` tokens of ids[start:stop], ascending and disjoint, that lie in
        `usable` nodes of the scope or public ones, wherever. Those of fewer than RUN_TOKENS are found
        by chance. A node may be removed once the store is not locked; nothing else makes a run wrong."""
        self.index_runs()
        with self.state.locked():
            return self.run_index.find(ids, start, stop, scope, n_min, usable)

    def index_runs(self) -> None:
        """Begin to enter what the store has into the index of runs, in a thread that ends when all of
        it is there; what is not entered yet is not found. `runs` calls it, too."""
        with self.state.locked():
            self.run_index.begin()
            if self._is_entering or not self.run_index.is_behind:
                return
            self._is_entering = True
        threading.Thread(target=self._enter_runs, name="towerd-runs", daemon=True).start()

    def _enter_runs(self) -> None:
        """Do the work of the index, in steps of two milliseconds at most under the lock."""
        try:
            while self._is_entering:
                with self.state.locked():
                    self.run_index.work()
                    self._is_entering = self.run_index.is_behind
                time.sleep(_ENTERING_PAUSE_S)
        except StoreError:
            pass  # closed
        finally:
            self._is_entering = False

    def holds_any(self, nodes: Collection[Node]) -> bool:
        """Whether a running request, of whatever process, needs one of these nodes."""
        with self.state.locked():
            return self.state.tree.holds_any(nodes, self.state.catalog.held_elsewhere())

    def insert(
        self, ids: Ids, scope: str, ends: Sequence[int], since: DeletionWatch | None = None
    ) -> list[Node]:
        """Make a path for `ids[:ends[-1]]` with a node end at exactly each of `ends` (strictly ascending, from 1 to len(ids));
        returns its nodes. One durable transaction. Raises SessionDeleted if `ids` are a session's deleted `since`."""
        data = path_bytes(ids, ends)
        with self.state.locked():
            self._sessions.check_not_deleted(since, None, scope, data, self.state.tree)
            return self.state.insert(data, scope, ends)

    def check_not_deleted(self, ids: Ids, scope: str, since: DeletionWatch | None) -> None:
        """Raises SessionDeleted if `ids` are those of a session that was deleted `since`."""
        with self.state.locked():
            data = ids_bytes(ids)
            self._sessions.check_not_deleted(since, None, scope, data, self.state.tree)

    def node(self, node_id: int) -> Node:
        """The node with this id. Raises NotFound."""
        with self.state.locked():
            return self.state.node(node_id)

    @property
    def writes(self) -> DailyWrites:
        """What is written to the store a day, and the budget for it."""
        return self.state.directory.writes

    @property
    def disk(self) -> DiskLimit:
        """What all of the store may take on the disk."""
        return self.state.directory.limit

    @property
    def tables(self) -> Path:
        """The folder for tables that frozen sessions need (`towerd.codec.Codec`)."""
        return self.state.directory.tables

    def nodes(self) -> list[Node]:
        """A snapshot of every node, in no order."""
        with self.state.locked():
            return list(self.state.tree.nodes.values())

    def viewers(self, file: SegmentFile) -> list[Node]:
        """A snapshot of the nodes whose rows are in `file`. Takes no lock."""
        return list(self.state.tree.viewers(file))

    def files(self) -> list[SegmentFile]:
        """A snapshot of every segment file, in no order."""
        with self.state.locked():
            return list(self.state.files.values())

    def touch(self, node: Node) -> None:
        """Note a use of `node` and everything above it; durable with the next `flush`."""
        with self.state.locked():
            self.state.touch(node)

    def flush(self) -> None:
        """Write recorded uses and maintain the catalog; meant for idle moments."""
        with self.state.locked():
            self.state.flush()
        self.state.catalog.rest()
        self.rows.replaced.remove()

    # --- rows -----------------------------------------------------------------------------

    def plan_rows(
        self,
        match: Match | Node,
        start: int,
        stop: int,
        *,
        worst: Provenance = Provenance.AFTER_MOVED,
    ) -> list[RowsPart]:
        """The rows that exist from token `start` on, up to the first gap, `stop`, or the end
        of the match (or of the node's path). Those of a provenance beyond `worst` count as
        none."""
        with self.state.locked():
            nodes = match.nodes if isinstance(match, Match) else match.path()
            n = match.n if isinstance(match, Match) else match.p1
            return self.rows.plan(nodes, start, min(stop, n), worst)

    def held(self, node: Node) -> Held:
        """The format of a node's rows, and their size."""
        with self.state.locked():
            return self.state.held(node)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock: nothing changes inside the block, and other threads wait, so
        keep it short."""
        with self.state.locked():
            yield

    def ram_bytes(self, node: Node) -> int:
        """Bytes that a node's rows take in RAM, or would if they were copied there: transform-coded ones are
        decoded, others stay in their formats."""
        if node.hot is None and node.file is not None and node.file.is_decoded(node.p0, node.p1):
            return self.bytes_of(node)
        return self.held(node).nbytes

    def bytes_of(self, node: Node) -> int:
        """Bytes of a node's rows in native format."""
        return node.n * self.state.row_identity.layout.token_bytes

    def take_out(self, node: Node) -> tuple[SegmentHeader, memoryview]:
        """The checked rows of the file that `node` has rows in, up to the end of the node, to be kept elsewhere:
        the header of such a file, and the data behind it as a view. Raises RowsDamaged or StoreError, also if
        it has none."""
        with self.state.locked():
            file = node.file
        if file is None:
            raise StoreError("the rows have left the disk")
        return take_out(self.state, self.rows, file, node, self._pool)

    def take_in(
        self,
        header: SegmentHeader,
        data: Iterable[bytes | memoryview],
        n_bytes: int,
        ids: Ids,
        *,
        is_durable: bool = True,
    ) -> SegmentFile | None:
        """Write a file that another store had, `n_bytes` of data behind its header, for the segments of its scope
        on the path of `ids` that lie within it and have no rows. None if there are none, or the disk has no
        room.

        is_durable: False leaves that to `durable.make_durable`

        Raises StateError (damaged, or of another model), DiskFull or StoreError; nothing is left behind then."""
        if not self.disk.make_room(n_bytes):
            return None
        what = header, data, n_bytes, ids_bytes(ids)
        return take_in(self.state, *what, self.rows.bases, self._pool, is_durable)

    # --- turns and sessions ---------------------------------------------------------------

    def commit_turn(self, turn: Turn) -> TurnResult:
        """Record a turn: its tokens and its session, in one transaction; durable on return. Raises
        SessionDeleted if the session that it continues was deleted since its request began."""
        prompt, reply = ids_bytes(turn.prompt), ids_bytes(turn.reply)
        data = prompt + reply
        n_prompt, n_cached = len(prompt) // ID_BYTES, turn.n_cached
        if not 0 <= n_cached <= len(data) // ID_BYTES:
            raise ValueError(f"n_cached {n_cached} of {len(data) // ID_BYTES} tokens")
        tail = data[n_cached * ID_BYTES :]
        with self.media.written(turn.media, turn.scope) as media, self.state.locked():
            # under whatever adapters: other rows, but the same conversation
            others = self._sessions.other_scopes(turn.scope)
            known = self.state.tree.matched(prompt, turn.scope, others)
            whose = turn.since, turn.session, turn.scope
            self._sessions.check_not_deleted(*whose, data, self.state.tree)
            with self.state.growing() as growth:
                node_ends = growth.grow_turn(data, turn.scope, n_prompt, n_cached, turn.n_base)
                session, is_new = self._sessions.enter(turn, known, growth.now)
                turn_id = self._sessions.record(session, turn, known, node_ends, tail, growth.now)
                enter_media(self.state.catalog, session.pk, media, growth.now)
            self.state.touch(node_ends[1])
        return TurnResult(session.id, node_ends[1], is_new, turn_id)

    def recognise(self, prompt: Ids, scope: str) -> str | None:
        """The id of the session that a turn with this prompt would be recorded under."""
        data = ids_bytes(prompt)
        with self.state.locked():
            known = self.state.tree.matched(data, scope, self._sessions.other_scopes(scope))
            found = self._sessions.recognise(known, scope)
        return None if found is None else found.id

    def session_beyond(self, node: Node, n: int, scope: str) -> tuple[str, int] | None:
        """The session of the tenant of `scope` with the longest turn on the path of `node`, and how many
        tokens of the path the turn has; None if none there is longer than `n`."""
        with self.state.locked():
            path = [] if node.removed else [each for each in node.path() if each.p1 > n]
            return self._sessions.last_on(path, scope)

    def sessions(self, scope: str | None = None, limit: int = SESSIONS_MAX) -> list[SessionInfo]:
        """Sessions of one scope, or of all, the last used first."""
        with self.state.locked():
            return self._sessions.listing(scope, limit)

    def count_sessions(self) -> Counter[int]:
        """Node id -> how many sessions begin with its whole prefix, each counted with its current
        branch alone. Takes the lock for some sessions at a time."""
        ends: Counter[int] = Counter()
        after, found = 0, [(0, 0)]
        while found:
            with self.state.locked():
                found = self._sessions.ends(after, _COUNTED_AT_ONCE)
            ends.update(end for _, end in found)
            after = found[-1][0] if found else after
        return self.state.tree.count_above(ends)

    def footprint(self) -> Footprint:
        """What all conversations take after each layer of the store."""
        return total_footprint(self.state)

    def footprints(
        self, infos: Sequence[SessionInfo], *, with_public: bool
    ) -> list[Footprint | None]:
        """What each session takes; None for those of other tokenizers. with_public: see
        `session_footprints`."""
        own = [info for info in infos if not info.tokenizer]
        with self.state.locked():
            ends = self._sessions.ends_of([info.leaf for info in own if info.leaf is not None])
        sharers = self._sharers()
        found = session_footprints(self.state, own, ends, sharers, with_public=with_public)
        return [None if info.tokenizer else next(found) for info in infos]

    def tier_costs(self, infos: Sequence[SessionInfo]) -> list[TierCost | None]:
        """What the current branch of each session takes in each tier; None for those of other tokenizers."""
        leaves = [info.leaf for info in infos if not info.tokenizer and info.leaf is not None]
        with self.state.locked():
            ends, branches = self._sessions.ends_of(leaves), self._sessions.count_branches(leaves)
        return [
            None
            if info.tokenizer
            else tier_cost(self.state, ends.get(info.leaf or 0, 0), branches.get(info.leaf or 0, 0))
            for info in infos
        ]

    def _sharers(self) -> Mapping[int, int]:
        """`count_sessions`, of a moment ago if it takes long: a twentieth of the time at most is
        spent on it."""
        began = time.monotonic()
        if began >= self._count_due:
            self._counted = self.count_sessions()
            took = time.monotonic() - began
            self._count_due = began + (_COUNT_PAUSES * took if took > _COUNT_QUICK_S else 0.0)
        return self._counted

    def sessions_beginning(
        self, prefix: str, scope: str | None = None, limit: int = SESSIONS_MAX
    ) -> list[SessionInfo]:
        """Sessions whose id was generated and begins with `prefix`, also those of other tokenizers."""
        with self.state.locked():
            own = self._sessions.beginning(prefix, scope, limit)
        return [*own, *self.foreign.beginning(prefix, scope, limit)][:limit]

    def session_page(self, after: int, limit: int) -> list[tuple[int, SessionInfo]]:
        """(row, session) of every tokenizer and scope, in order of the rows behind `after`."""
        with self.state.locked():
            return session_page(self.state.catalog, self.state.identity.tokenizer, after, limit)

    def session(self, id: str, scope: str | None = None) -> SessionInfo:
        """One session. Raises NotFound; StoreError if scope is None and the id is ambiguous."""
        with self.state.locked():
            return self._sessions.info(self._sessions.find(id, scope))

    def turns(self, id: str, scope: str | None = None) -> list[TurnInfo]:
        """Every turn of a session, oldest first. Raises as `session`."""
        with self.state.locked():
            return self._sessions.turns(self._sessions.find(id, scope))

    def session_ids(self, id: str, scope: str | None = None) -> Ids:
        """Every token of the session's current branch, int32. Raises as `session`."""
        with self.state.locked():
            node_id, tail = self._sessions.leaf_ids(self._sessions.find(id, scope))
            prefix = self.state.tree.nodes[node_id].prefix_bytes() if node_id else b""
        return ids_array(prefix + tail)

    def history(self, id: str, scope: str | None = None) -> History:
        """A session in a form that another store can import. Raises as `session`."""
        with self.state.locked():
            found = self._sessions.find(id, scope)
            taken = copy_history(self._sessions, found, self.state.tree.nodes, self.bases)
        return taken.history()

    def add_history(
        self,
        history: History,
        scope: str,
        since: DeletionWatch | None = None,
        media: Sequence[KeptMedium] = (),
    ) -> int:
        """Add the turns that the session with the history's id lacks, as branches if it continued otherwise here, and media,
        in one transaction; returns how many. Raises InvalidRequest (a bad name), SessionDeleted (deleted `since`)."""
        with self.state.locked(), self.state.growing() as growth:
            self._sessions.check_not_deleted(since, history.id, scope)
            return add_history(self.state, self._sessions, growth, history, scope, media)

    def rename_session(self, id: str, title: str, scope: str | None = None) -> SessionInfo:
        """Set a session's title. Raises as `session`, or InvalidRequest."""
        with self.state.locked():
            found = self._sessions.find(id, scope)
            self._sessions.rename(found, title)
            return self._sessions.info(found)

    def delete_session(self, id: str, scope: str | None = None) -> None:
        """Forget a session; `gc` then frees what nothing else needs, and overwrites it. What is on
        its way into it is not recorded (`watch_deletions`). Raises as `session`."""
        with self.state.locked():
            found, nodes = self._sessions.find(id, scope), self.state.tree.nodes
            with self.media.leaving(found.pk):
                self.cold.forget(self._sessions.delete(found, nodes, self.deletions))

    def keep_response(
        self, new: NewResponse, session: str, scope: str, since: DeletionWatch | None = None
    ) -> bool:
        """Keep a response whose turn is in the session of this id and scope; "": it is in none. Returns
        False and keeps nothing if that was deleted `since`, also where another one has the id by now,
        or if what the response continues was deleted. since: None: this call"""
        if not session:
            return self.responses.add(new, None)
        since = since or self.deletions.watch()
        with self.state.locked():
            found = self._sessions.lookup(session, scope)
        if found is None:
            return False
        was_deleted = partial(self._sessions.is_deleted, since, session, scope)
        return self.responses.keep(new, found.pk, was_deleted)

    def session_of_context(
        self, context: ResponseContext, named: str | None, scope: str
    ) -> int | None:
        """The row of the session of this name and scope, else of what a response follows; None: there is none."""
        with self.state.locked():
            found = self._sessions.lookup(named, scope) if named else None
            return self.responses.session_of(context) if found is None else found.pk

    # --- upkeep ---------------------------------------------------------------------------

    def gc(self, *, quarantine_days: float = 30, dry_run: bool = False) -> GcReport:
        """Remove, or only count, what no session, base, pin or running request needs. Then nothing
        of deleted sessions is left in any file."""
        with self.state.locked():
            report = collect(self.state, self.rows.bases, quarantine_days, dry_run=dry_run)
        if dry_run:
            return report.with_files(self.media.orphans())
        return erase(self.state, self.rows, self.vocabularies, self.media, report)

    def verify(
        self, progress: Callable[[int, int], None] | None = None, *, repair: bool = False
    ) -> VerifyReport:
        """Read everything again and check it; `progress(done_bytes, total_bytes)`. `repair`:
        quarantine damaged files, and rebuild a damaged catalog or journal from the other one.
        The lock is not held while files are read."""
        parts = self.state, self.rows, self.cold, self.media, self._pool
        return verify(*parts, progress, repair=repair)

    def check_integrity(self, *, keys: bool = False) -> None:
        """AssertionError unless prefix tree, catalog, files and sums agree; `keys`: recompute them."""
        with self.state.locked():
            found = problems(self.state, keys=keys)
        if found:
            raise AssertionError("; ".join(found[:20]))

    def stats(self) -> dict[str, Any]:
        """Counts and sizes, for /metrics and people."""
        with self.state.locked():
            found = self.state.stats() | self.cold.stats()
        return found | self.disk.stats()

    def get_meta(self, key: str) -> str | None:
        """A small value kept for other modules."""
        with self.state.locked():
            return self.state.catalog.get_meta(key)

    def set_meta(self, key: str, value: str) -> None:
        """Durable when it returns."""
        with self.state.locked():
            self.state.catalog.set_meta(key, value)


def _identify(model: WhichModel, catalog: Catalog) -> ModelIdentity:
    """The identity of the model to open a store for."""
    found = model(catalog) if callable(model) else model
    return ModelIdentity(found) if isinstance(found, RowIdentity) else found
