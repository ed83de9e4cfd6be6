"""SharedTier: the rows of a path in the bucket, put there and fetched from there.

It is never on the way of an answer: what it does takes as long as the network does, so whoever calls it
has a thread for that. A record in the bucket says which objects a path has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import takewhile

import msgspec

from towerd.codec.errors import CodecError, NewerVersion
from towerd.codec.rows.basis import BYTES_MAX, read_basis
from towerd.errors import InvalidRequest, StoreError
from towerd.slots.errors import StateError
from towerd.store import Node, Store
from towerd.store.files.durable import make_durable
from towerd.store.rows.checkpoints import StateCheckpoint
from towerd.store.segments.coded_format import bases_in, basis_name
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_header import encode_runs, worst_of
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.tree.node import PUBLIC
from towerd.store.tree.scope import adapters_of, is_public, tenant_of
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.formats.fidelity import Fidelity
from towerd.tiers.shared.bucket import Bucket, BucketError, ObjectDamaged, ObjectMissing
from towerd.tiers.shared.checkpoints import SharedCheckpoints
from towerd.tiers.shared.counters import SharedCounters
from towerd.tiers.shared.deleting.collector import Collector
from towerd.tiers.shared.deleting.free_place import free_place
from towerd.tiers.shared.deleting.leases import Hold, Holds, awake_or_asleep
from towerd.tiers.shared.marks import FoundMark, Marks
from towerd.tiers.shared.measured_speed import MeasuredSpeed
from towerd.tiers.shared.naming import (
    NAMING_BYTES_MAX,
    RECORD_BYTES_MAX,
    MarkedWay,
    Naming,
    behind_naming,
    with_naming,
)
from towerd.tiers.shared.objects import (
    BasisPlace,
    CheckpointPlace,
    PartsAhead,
    PutRows,
    RowsHeader,
    RowsPlace,
    count_parts,
    has_object,
    name_and_lead,
    put_object,
    read_rows,
)
from towerd.tiers.shared.records import RecordName, short_name
from towerd.tiers.shared.sealing import SEAL_BYTES, TenantKeys
from towerd.tokens import Ids, Provenance, common_prefix, ids_array, ids_bytes

log = logging.getLogger(__name__)

AGAIN_S = 3600.0
"""Time after which it is looked whether what was put is still there."""


class SharedTier:
    """Thread-safe."""

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        master: bytes,
        fidelity: Fidelity,
        *,
        has_rows: bool,
        checkpoints: CheckpointTier | None = None,
        clock: Callable[[], float] = awake_or_asleep,
    ) -> None:
        """master: the content of the key file
        fidelity: exact: neither put nor fetch rows that are not; prompts find rows of the same fidelity
        has_rows: whether the model has rows of single positions
        checkpoints: those that it needs to resume; None: it does from any row
        clock: seconds since some moment"""
        self.bucket = bucket
        self.counters = SharedCounters()
        self._store = store
        self._master = master
        self._collector_keys = TenantKeys.of_collector(master)
        self._holds = Holds(bucket, self._collector_keys, clock)
        self._clock = clock
        self._fidelity = fidelity
        self._worst = Provenance.EXACT if fidelity == "exact" else Provenance.APPROXIMATE
        self._has_rows = has_rows
        self._checkpoints = (
            None
            if checkpoints is None
            else SharedCheckpoints(store, checkpoints, has_rows=has_rows)
        )
        self._put_speed = MeasuredSpeed()
        self._fetch_speed = MeasuredSpeed()
        self._lock = threading.Lock()
        self._fetched: list[SegmentFile] = []
        """Files that are not durable yet."""

    def keys(self, scope: str) -> TenantKeys:
        """Those of the tenant of a scope."""
        return TenantKeys.of(self._master, tenant_of(scope))

    def held(self) -> AbstractContextManager[Hold]:
        """What this thread reads and puts inside of this is not deleted meanwhile."""
        return self._holds.held()

    def start_writing(self) -> None:
        """What is read from now on, until the hold of this thread ends, may be named in a record. Raises
        BucketError."""
        with self.held() as hold:
            hold.writing()

    def lasting(self, found: PutRows) -> PutRows:
        """What of it is not about to be deleted. Raises BucketError."""
        with self.held() as hold:

            def lasts(each: RowsPlace | BasisPlace | CheckpointPlace) -> bool:
                return not hold.is_condemned(f"objects/{each.name}")

            rows = list(filter(lasts, found.rows))
            bases = list(filter(lasts, found.transform_bases))
            return PutRows(rows, bases, list(filter(lasts, found.checkpoints)))

    def collector(self) -> Collector:
        """What deletes from the bucket, for one thread."""
        return Collector(self.bucket, self._collector_keys, self._holds, self._clock)

    # --- out ------------------------------------------------------------------------------

    def put_path(self, ids: Ids, scope: str) -> PutRows:
        """Put the rows that the disk has of `ids` from the first token on, as far as they follow one another, and
        the bucket lacks, and the last state checkpoints; what it has, in whatever format and of whichever machine, is
        left. Of a model that resumes from checkpoints nothing behind the last one is put. Raises BucketError or
        StoreError."""
        states = None if self._checkpoints is None else self._checkpoints.to_put(ids, scope)
        if states is not None:
            ids = ids[: states[-1].position if states else 0]
        if not len(ids) or not self.can_resume:
            return PutRows()
        last = self._last_of_files(ids, scope)
        with self.held() as hold:
            found = self._there(hold, ids, scope, [node.p1 for node in last])
            for node in last:
                if node.p1 > found.n_rows:  # what is there may have another format
                    place = self._put_file(hold, node, found)
                    if place is None:
                        break
                    found.rows.append(place)
            self._put_checkpoints(hold, states or (), found)
            if found.rows or found.checkpoints:
                data = ids_bytes(ids[: found.n_tokens])
                self._count_put(self._marks(scope).put(hold, self.keys(scope), data, found))
        return found

    def way(self, ids: Ids, scope: str, put: PutRows) -> MarkedWay | None:
        """What a record says of the marks that `put_path` put for it; None without any."""
        if not put.rows and not put.checkpoints:
            return None
        return self._marks(scope).way(self.keys(scope), ids_bytes(ids[: put.n_tokens]), put)

    def states_of(
        self, places: Iterable[CheckpointPlace], ids: Ids, scope: str
    ) -> list[CheckpointPlace]:
        """Those that are of what `ids` begin with."""
        return [] if self._checkpoints is None else self._checkpoints.of(places, ids, scope)

    def kept(self, ids: Ids, scope: str, put: PutRows) -> None:
        """Say that a record names what was put of `ids`: the disk may do without the files with these rows."""
        for node in self._last_of_files(ids, scope):
            file = node.file
            if file is not None and file.p0 + file.n_rows == node.p1 <= put.n_rows:
                file.in_bucket_until = time.monotonic() + AGAIN_S

    @property
    def can_resume(self) -> bool:
        """Whether there is anything that the model resumes from."""
        return self._has_rows or self._checkpoints is not None

    def _put_checkpoints(
        self, hold: Hold, states: Sequence[StateCheckpoint], found: PutRows
    ) -> None:
        """Put the states that have all rows before them in the bucket."""
        known = {each.position for each in found.checkpoints}
        for state in states:
            if state.position in known or (self._has_rows and state.position > found.n_rows):
                continue
            assert self._checkpoints is not None
            keys = self.keys(state.node.scope)
            try:
                place, lead, data = self._checkpoints.object_of(state, keys)
            except StoreError as error:
                said = {"error": str(error)}
                log.warning("a checkpoint is not put into the shared tier", extra=said)
                continue
            place = msgspec.structs.replace(place, name=hold.free_name(place.name))
            self._count_put(put_object(hold, keys, place.name, lead, data))
            found.checkpoints.append(place)
        found.checkpoints.sort(key=lambda place: place.position)

    def _there(self, hold: Hold, ids: Ids, scope: str, stored: Sequence[int]) -> PutRows:
        """What the bucket has of `ids` from the first token on, whether or not it is on the disk.

        stored: the ends of the files here, ascending"""
        n = len(ids)
        ends = sorted({*stored, n - 1, n}, reverse=True)  # the last token may have no row
        hold.writing()  # before anything is read that may be named again
        found = self._already_there(hold, ids, scope, [end for end in ends if 0 < end <= n])
        n_here = max(found.n_tokens, stored[-1] if stored else 0)
        mark = None if n_here >= n - 1 else self.find(ids, scope, n_here)
        further = PutRows() if mark is None else self._whole(hold, mark)
        return max(found, further, key=lambda put: put.n_tokens)

    def _already_there(self, hold: Hold, ids: Ids, scope: str, ends: Sequence[int]) -> PutRows:
        """What the bucket has of `ids`, from the first token on to the furthest of `ends`, descending, that has a
        mark."""
        data, marks = ids_bytes(ids), self._marks(scope)
        for end in ends:
            for keys in (self.keys(scope), self.keys(PUBLIC)):
                try:
                    mark = marks.at(keys, data, end)
                except (StateError, ObjectDamaged) as error:
                    self._refuse("marks", error)
                    continue
                if mark is not None:
                    return self._whole(hold, mark)
        return PutRows()

    def _whole(self, hold: Hold, mark: FoundMark) -> PutRows:
        """Those of the rows that are of a mark's tokens alone, still there, and not about to go."""
        bases = mark.put.transform_bases
        if not all(has_object(hold, place.name) for place in bases):
            return PutRows()
        inside = takewhile(lambda place: place.p1 <= mark.n_tokens, mark.put.rows)
        rows = takewhile(lambda place: has_object(hold, place.name), inside)
        states = [
            each
            for each in mark.put.checkpoints
            if each.position <= mark.n_tokens and has_object(hold, each.name)
        ]
        return PutRows(list(rows), list(bases), states)

    def model_name(self, scope: str) -> str:
        """What a record's name says of the model whose rows prompts find, here and elsewhere."""
        return short_name(self.keys(scope), "model", *self._model(scope))

    def _model(self, scope: str) -> tuple[bytes, ...]:
        """What tells rows from others: row identity, adapters, fidelity."""
        return self._store.state.digest, adapters_of(scope).encode(), self._fidelity.encode()

    def _marks(self, scope: str) -> Marks:
        return Marks(self.bucket, self._collector_keys, self._model(scope))

    def _last_of_files(self, ids: Ids, scope: str) -> list[Node]:
        """The last node of each file that has rows of `ids`, up to the first gap."""
        last: list[Node] = []
        with self._store.locked():
            match = self._store.match(ids, scope)
            for node in match.nodes:
                if (
                    node.file is None
                    or node.p0 >= match.n
                    or node.file.worst(node.p0, node.p1) > self._worst
                ):
                    break
                if last and last[-1].file is node.file:
                    last.pop()
                last.append(node)
        return last

    def _put_file(self, hold: Hold, node: Node, found: PutRows) -> RowsPlace | None:
        """Put the file that `node` has rows in; None if it has other rows by now, or none."""
        with self._store.locked():
            prefix = node.prefix_ids()
        try:
            header, data = self._store.take_out(node)
            if worst_of(header.run_table, 0, header.n) > self._worst:
                return None
            keys = self.keys(header.scope)
            bases = bases_in(encode_runs(header.run_table))
            self._put_bases(hold, bases, keys, header.scope, found)
            before = ids_bytes(prefix[: header.p0])
            rows = RowsHeader.of(header, adapters_of(header.scope), before, data)
            name, lead = name_and_lead(keys, rows)
        except (StoreError, StateError, CodecError, OSError) as error:
            log.warning("rows are not put into the shared tier", extra={"error": str(error)})
            return None
        name, n_bytes = hold.free_name(name), len(lead) + len(data)
        with data:  # else the file stays mapped for as long as an error remembers this frame
            began, sent = time.monotonic(), put_object(hold, keys, name, lead, data)
        if sent:
            self._put_speed.moved(sent, began)
        self._count_put(sent)
        parts = count_parts(n_bytes), n_bytes
        return RowsPlace(name, header.p0, header.p1, is_public(header.scope), *parts)

    def _put_bases(
        self, hold: Hold, names: set[str], keys: TenantKeys, scope: str, found: PutRows
    ) -> None:
        """Put the transform bases of these names, before what needs them."""
        known = {each.basis for each in found.transform_bases}
        for basis in sorted(names - known):
            data = self._store.rows.bases.get(basis, self._store.state.digest).data
            name = hold.free_name(keys.name("basis", data))
            self._count_put(put_object(hold, keys, name, data))
            found.transform_bases.append(BasisPlace(basis, name, is_public(scope)))

    def _count_put(self, n_bytes: int) -> None:
        self.counters.add(put=int(n_bytes > 0), bytes_put=n_bytes)

    def put_record(
        self, scope: str, folder: str, name: RecordName, data: bytes, named: Naming
    ) -> None:
        """Put a record, unless it was put in the last day. What it names was found or put in the same hold. Raises
        BucketError; InvalidRequest if it is too long."""
        if len(data) + SEAL_BYTES > RECORD_BYTES_MAX:
            raise InvalidRequest(
                f"It takes {len(data)} bytes; the shared tier takes up to {RECORD_BYTES_MAX}."
            )
        keys = self.keys(scope)
        with self.held() as hold:
            if any(hold.is_condemned(f"objects/{each}") for each in named.objects):
                raise BucketError(
                    "What a record names is being deleted from the shared tier: put it again."
                )
            place, is_there = free_place(hold, self.bucket.listing(folder), folder, name)
            if not is_there:
                sealed = with_naming(self._collector_keys, keys, place, named, data)
                self._count_put(len(sealed) if hold.put(place, sealed) else 0)

    # --- in -------------------------------------------------------------------------------

    def find(self, ids: Ids, scope: str, n_known: int) -> FoundMark | None:
        """Where the bucket has rows of what a prompt begins with, the tenant's own or public ones, whichever reach
        further; None if it has none beyond the first `n_known`. Raises BucketError."""
        if not self.can_resume:
            return None
        data, marks = ids_bytes(ids), self._marks(scope)

        def find(keys: TenantKeys) -> FoundMark | None:
            try:
                return marks.find(keys, data, n_known)
            except (StateError, ObjectDamaged, ObjectMissing) as error:
                self._refuse("marks", error)
                return None

        with ThreadPoolExecutor(2, "towerd-find") as threads:
            found = list(threads.map(find, (self.keys(scope), self.keys(PUBLIC))))
        marked = (mark for mark in found if mark is not None)
        return max(marked, key=lambda mark: (mark.n_tokens, mark.put.n_tokens), default=None)

    def fetch_path(
        self,
        found: PutRows,
        ids: Ids,
        scope: str,
        since: DeletionWatch | None = None,
        *,
        n_common: int | None = None,
        is_durable: bool = True,
    ) -> None:
        """Fetch the rows of `ids` that this store lacks, in order, up to the first that cannot be had. What is
        missing or damaged is counted and logged: its tokens are evaluated when they are needed.

        n_common: tokens of `found` that are those of `ids` for certain; None: all. Rows from there on are not fetched
        ahead.
        is_durable: False leaves that to `settle`
        Raises BucketError (it is not reached), SessionDeleted (since then), DiskFull or StoreError."""
        if self._checkpoints is None:
            self._fetch_files(found, ids, scope, since, n_common, is_durable)
            return
        state = self._checkpoints.usable(found.checkpoints, ids, scope)
        if state is not None and state.position > self.n_stored(ids, scope):
            rows = ids[: state.position]
            with self.held() as hold:
                self._fetch_files(found, rows, scope, since, n_common, is_durable)
                hold.reading()
                self._fetch_checkpoint(state, ids, scope, since)

    def _fetch_files(
        self,
        found: PutRows,
        ids: Ids,
        scope: str,
        since: DeletionWatch | None,
        n_common: int | None,
        is_durable: bool,
    ) -> None:
        """The rows alone. See `fetch_path`."""
        self._fetch_bases(found.transform_bases, scope)
        lacking = self._lacking(found, ids, scope)
        parts, began, n_bytes = PartsAhead(self.bucket), time.monotonic(), 0
        try:
            for place in lacking:
                if n_common is None or place.p0 < n_common:
                    parts.expect(self._keys_of(place, scope), place.name, place.n_parts)
            with self.held() as hold:
                for place in lacking:
                    hold.reading()
                    n_stored = self._n_rows(ids, scope)
                    if n_stored < place.p0:
                        break
                    if n_stored >= min(place.p1, len(ids)):
                        continue
                    try:
                        n_fetched = self._fetch_rows(place, parts, ids, scope, since, is_durable)
                    except (StateError, NewerVersion, ObjectDamaged, ObjectMissing) as error:
                        self._refuse(place.name, error)
                        break
                    if not n_fetched:
                        break
                    n_bytes += n_fetched
        finally:
            parts.close()
            if n_bytes:
                self._fetch_speed.moved(n_bytes, began)

    def _lacking(self, found: PutRows, ids: Ids, scope: str) -> list[RowsPlace]:
        """The rows that this store lacks of `ids`, as far as the day's budget for writing has room."""
        lacking: list[RowsPlace] = []
        n_stored, n_bytes = self._n_rows(ids, scope), 0
        for place in found.rows if self._has_rows else ():
            if place.p0 >= len(ids):
                break
            if n_stored < min(place.p1, len(ids)):
                n_bytes += place.n_bytes
                if not (
                    self._can_take(place, ids, scope) and self._store.writes.allows("rows", n_bytes)
                ):
                    break
                lacking.append(place)
        return lacking

    def _can_take(self, place: RowsPlace, ids: Ids, scope: str) -> bool:
        """Whether tokens of a file's rows have none here: moved or approximate ones, which may not count, stay."""
        with self._store.locked():
            match = self._store.match(ids, scope)
            inside = [node for node in match.nodes if node.p0 < place.p1 and place.p0 < node.p1]
            is_known = match.n >= min(place.p1, len(ids))
            return not is_known or not all(node.has_rows for node in inside)

    def settle(self) -> None:
        """Make durable what was fetched and is not yet."""
        with self._lock:
            fetched, self._fetched = self._fetched, []
        for file in fetched:
            try:
                make_durable(file.path)
            except OSError as error:
                said = {"file": file.path.name, "error": error.strerror or str(error)}
                log.warning("fetched rows may not survive a power cut", extra=said)

    def _fetch_checkpoint(
        self, place: CheckpointPlace, ids: Ids, scope: str, since: DeletionWatch | None
    ) -> None:
        """If all rows before it are here, for a model that has rows."""
        if self._has_rows and self._n_rows(ids, scope) < place.position:
            return
        assert self._checkpoints is not None
        keys, parts = self._keys_of(place, scope), PartsAhead(self.bucket)
        began = time.monotonic()
        try:
            parts.expect(keys, place.name, place.n_parts)
            coming = parts.of(keys, place.name)
            n_bytes = self._checkpoints.take(place, keys, coming, ids, scope, since)
        except (StateError, ObjectDamaged, ObjectMissing) as error:
            self._refuse(place.name, error)
            return
        finally:
            parts.close()
        self._fetch_speed.moved(n_bytes, began)
        self.counters.add(fetched=1, bytes_fetched=n_bytes)

    def n_stored(self, ids: Ids, scope: str) -> int:
        """Tokens of `ids` that need not be evaluated: with rows here, from the first on, up to a state checkpoint if
        the model needs one."""
        n_rows = self._n_rows(ids, scope)
        if self._checkpoints is None:
            return n_rows
        return self._checkpoints.n_resumable(ids, scope, n_rows)

    def _n_rows(self, ids: Ids, scope: str) -> int:
        with self._store.locked():
            parts = self._store.plan_rows(
                self._store.match(ids, scope), 0, len(ids), worst=self._worst
            )
        return parts[-1].p1 if parts else 0

    def _keys_of(self, place: RowsPlace | BasisPlace | CheckpointPlace, scope: str) -> TenantKeys:
        return self.keys(PUBLIC if place.is_public else scope)

    def _fetch_rows(
        self,
        place: RowsPlace,
        parts: PartsAhead,
        ids: Ids,
        scope: str,
        since: DeletionWatch | None,
        is_durable: bool,
    ) -> int:
        """The bytes that came. 0 if there is nothing to write: they are of tokens that `ids` does not have, as those
        behind a mark may be. Raises as `fetch_path`, and StateError."""
        n_stored = self._n_rows(ids, scope)
        keys = self._keys_of(place, scope)
        found = read_rows(keys, place.name, parts.of(keys, place.name))
        header, digest, adapters = found.header, self._store.state.digest, adapters_of(scope)
        ids = ids[: header.p0 + common_prefix(ids[header.p0 :], ids_array(header.ids))]
        if 0 < len(ids) <= n_stored:
            return 0
        header.as_segment(digest, scope, adapters, ids_bytes(ids))
        with self._store.locked():
            ends = sorted({header.p0, len(ids)} - {0})
            owner = self._store.insert(ids, scope, ends, since)[-1].scope
        if is_public(owner) and not place.is_public:
            raise StateError("they are a tenant's own, and their tokens are everybody's here")
        segment = header.as_segment(digest, owner, adapters, ids_bytes(ids))
        if worst_of(segment.run_table, 0, segment.n) > self._worst:
            raise StateError("they are not exact")
        data = found.data, header.n_bytes
        file = self._store.take_in(segment, *data, ids, is_durable=is_durable)
        if file is not None and not is_durable:
            with self._lock:
                self._fetched.append(file)
        self.counters.add(fetched=1, bytes_fetched=0 if file is None else file.nbytes)
        if file is not None:
            file.in_bucket_until = time.monotonic() + AGAIN_S
        return header.n_bytes

    def put_bytes_per_s(self) -> float:
        """Of rows that were put last; 0 if that is long ago, or never was."""
        return self._put_speed.bytes_per_s()

    def bytes_per_s(self) -> float:
        """Of rows that were fetched last; 0 if that is long ago, or never was."""
        return self._fetch_speed.bytes_per_s()

    def _fetch_bases(self, places: Sequence[BasisPlace], scope: str) -> None:
        bases = self._store.rows.bases
        for place in places:
            if bases.problem(place.basis) is None:
                continue
            parts = PartsAhead(self.bucket)
            try:
                data = b""
                for part in parts.of(self._keys_of(place, scope), place.name):
                    data += part
                    if len(data) > BYTES_MAX:
                        raise StateError("it is too long for a basis")
                basis = read_basis(data)
                if basis_name(basis.digest) != place.basis:
                    raise StateError("it is another basis than its record says")
                bases.add(basis)
            except (StateError, CodecError, ObjectDamaged, ObjectMissing) as error:
                self._refuse(place.name, error)
            finally:
                parts.close()

    def own_record(self, scope: str, place: str) -> bytes | None:
        """A record; None if it is another tenant's, damaged or gone. Raises BucketError."""
        try:
            found = self.bucket.get(place, RECORD_BYTES_MAX + NAMING_BYTES_MAX)
            return behind_naming(self.keys(scope), place, found)
        except (ObjectDamaged, ObjectMissing, StateError):
            return None

    def read_record(self, scope: str, place: str) -> bytes:
        """A record of a tenant. Raises BucketError, ObjectDamaged, ObjectMissing."""
        try:
            found = self.bucket.get(place, RECORD_BYTES_MAX + NAMING_BYTES_MAX)
            data = behind_naming(self.keys(scope), place, found)
        except (ObjectDamaged, ObjectMissing) as error:
            self._refuse(place, error)
            raise
        except StateError as error:
            self._refuse(place, error)
            raise ObjectDamaged(f"The object {place} cannot be used: {error}.") from error
        self.counters.add(fetched=1, bytes_fetched=len(data))
        return data

    def _refuse(self, name: str, error: Exception) -> None:
        is_missing = isinstance(error, ObjectMissing)
        self.counters.add(missing=int(is_missing), damaged=int(not is_missing))
        said = {"object": name, "error": str(error)}
        log.warning("an object of the shared tier cannot be used", extra=said)
