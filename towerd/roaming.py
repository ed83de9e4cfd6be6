"""Sessions and bases in the shared tier: put there, by hand or in idle time, and taken from there.

A session's record holds its `.tower` file and says which objects its rows are in; a base's holds its
tokens. Records are made anew after each turn, with the turns of all that are there: a session that two machines
continued has two branches. What is put by itself are the bases and the sessions with pinned segments, which people said are worth keeping, and what is about
to leave the disk for want of space.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np

from towerd.cold import ColdTier
from towerd.cold.coding import SessionModel
from towerd.errors import InvalidRequest, NotFound, SessionFrozen, ThawError, TowerdError
from towerd.slots.errors import StateError
from towerd.store import Base, History, Store
from towerd.store.sessions.branches import merged, turn_digests
from towerd.store.sessions.turn import ANYWHERE
from towerd.store.tree.scope import (
    adapters_of,
    is_public,
    public_of,
    scope_of,
    tenant_of,
)
from towerd.tiers.manager import PRESSED_SHARE, Tiers
from towerd.tiers.shared.bucket import BucketError, Listed, ObjectDamaged, ObjectMissing
from towerd.tiers.shared.collector import Collected
from towerd.tiers.shared.fetcher import Fetcher
from towerd.tiers.shared.heads import Head, Heads, read_heads
from towerd.tiers.shared.leaving import Leaving
from towerd.tiers.shared.naming import Naming, naming
from towerd.tiers.shared.objects import (
    VERSION,
    BaseRecord,
    PutRows,
    R,
    SessionRecord,
    decode_record,
    encode,
    put_of,
)
from towerd.tiers.shared.records import (
    AGAIN,
    NamedRecord,
    RecordName,
    best_first,
    short_name,
    version_of,
)
from towerd.tiers.shared.tier import AGAIN_S, SharedTier
from towerd.tokens import Ids, ids_array, ids_bytes
from towerd.transfer import history_in, import_session, outline, session_file, session_history

log = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_S = 5.0
"""Something is put by itself when no request has run for this long."""
POLL_S = 5.0
LEAVING_SHARE = 0.8
"""From this share of the budget for rows on disk on, what leaves first is put, once nothing runs."""
RETRY_S_MIN = 10.0
RETRY_S_MAX = 600.0
_LISTED_MAX = 1_000_000
"""Records of all sessions, or of all bases."""
_RECORDS_TRIED = 8
"""Of a session or base, the newest first, until one is whole."""


class Roaming:
    """The thread that talks with the bucket, and what is done there. Its coroutines belong to the event
    loop."""

    def __init__(self, shared: SharedTier, tiers: Tiers, cold: ColdTier) -> None:
        self._shared, self._tiers, self._cold = shared, tiers, cold
        self.fetcher = Fetcher(shared)
        self._store: Store = cold.store
        self._leaving = Leaving(
            self._store,
            shared,
            tiers.evictor.least_valuable,
            self.fetcher.is_worth_putting,
            self._push_session,
        )
        self._thread = ThreadPoolExecutor(1, "towerd-shared")
        self._task: asyncio.Task[None] | None = None
        self._put: dict[tuple[object, ...], float] = {}
        """What was put by itself, as it was then, and time.monotonic() of that."""
        self._retry_s = 0.0
        self._collector = shared.collector()

    def stats(self) -> dict[str, Any]:
        """Counters, for /metrics and people."""
        return self._shared.counters.stats() | self.fetcher.stats()

    def start(self) -> None:
        """Begin to put bases and pinned sessions while nothing else runs."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Begin nothing more; every request to the bucket ends at once with an error."""
        self._shared.bucket.close()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Wait for what runs here, after `stop`."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self.fetcher.close()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    # --- by hand --------------------------------------------------------------------------

    async def push_session(self, id: str, scope: str | None) -> dict[str, Any]:
        """Put a session: `session`, `tokens` and those with `rows` in the bucket. Raises NotFound, BucketError or
        what an export raises."""
        return await self._do(self._push_session, id, scope)

    async def push_base(self, name: str, scope: str) -> dict[str, Any]:
        """Put a base that the tenant of `scope` can use: `base`, `tokens` and those with `rows`. Raises NotFound or
        BucketError."""
        return await self._do(lambda: self._push_base(self._base(name, scope)))

    async def pull_session(self, id: str, scope: str) -> dict[str, Any]:
        """Take a session: as an import, and `tokens` and those with `rows` here. Raises NotFound, BucketError or
        what an import raises."""
        return await self._do(self._pull_session, id, scope)

    async def pull_base(self, name: str, scope: str, replace: bool = False) -> dict[str, Any]:
        """Take a base, the tenant's own or else a public one: `base`, `tokens` and those with `rows` here. Raises
        as `pull_session`, and InvalidRequest if one of another text has its name here and is not to be
        replaced."""
        return await self._do(self._pull_base, name, scope, replace)

    async def remove_session(self, id: str, scope: str) -> dict[str, Any]:
        """Delete a session there: `session`, and how many `records` it had. Its rows go with a later `collect`, unless
        another record names them. Raises BucketError."""
        n = await self._do(self._remove, self._session_folder(id, scope))
        return {"session": id, "records": n}

    async def remove_base(self, name: str, scope: str) -> dict[str, Any]:
        """Delete a base of the tenant there, as `remove_session`."""
        n = await self._do(self._remove, self._base_folder(name, scope))
        return {"base": name, "records": n}

    async def collect(self, older_than: timedelta | None, dry_run: bool) -> dict[str, Any]:
        """Take garbage one phase further; see Collector. Raises BucketError."""
        done = await self._do(partial(self._collector.run, older_than, dry_run=dry_run))
        if not dry_run:
            self._count(done)
        return asdict(done)

    async def listing(self, scope: str) -> dict[str, Any]:
        """What a tenant can pull: `sessions` and `bases`, those put last first. Raises BucketError."""
        return await self._do(self._listing, scope)

    async def _do(self, work: Callable[..., T], *args: Any) -> T:
        def run() -> T:
            try:
                with self._shared.held():
                    return work(*args)
            except BucketError:
                self._shared.counters.add(errors=1)
                raise

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _remove(self, folder: str) -> int:
        done = self._collector.remove_folder(folder)
        self._count(done)
        return done.records

    def _count(self, done: Collected) -> None:
        self._shared.counters.add(collected=done.objects, bytes_collected=done.bytes)

    # --- what is there, on the thread -----------------------------------------------------

    def _listing(self, scope: str) -> dict[str, Any]:
        sessions, bases = [], []
        for named, of_session, _ in self._readable("sessions", SessionRecord, (scope,)):
            with suppress(InvalidRequest):  # of a newer version
                sessions.append({**outline(of_session.tower), **_told(named)})
        for named, base, of in self._readable("bases", BaseRecord, (scope, public_of(scope))):
            bases.append(
                {
                    "name": base.name,
                    "public": is_public(of),
                    "tokens": len(ids_array(base.ids)),
                    **_told(named),
                }
            )
        newest: dict[str, Any] = {"key": lambda each: each["put"], "reverse": True}
        return {"sessions": sorted(sessions, **newest), "bases": sorted(bases, **newest)}

    def _readable(
        self, folder: str, kind: type[R], scopes: Sequence[str]
    ) -> Iterator[tuple[NamedRecord, R, str]]:
        """The best record of each session or base in a folder that can be read for one of these scopes, and the scope:
        names tell nobody whose they are."""
        folders: dict[str, list[Listed]] = {}
        for each in self._shared.bucket.listing(folder, _LISTED_MAX):
            folders.setdefault(each.place.rpartition("/")[0], []).append(each)
        for listed in folders.values():
            for scope in scopes:
                best = best_first(listed, self._shared.model_name(scope))[:1]
                data = self._shared.own_record(scope, best[0].place) if best else None
                if data is not None:
                    with suppress(StateError):
                        yield best[0], decode_record(data, kind), scope
                    break

    # --- sessions, on the thread ----------------------------------------------------------

    def _push_session(
        self, id: str, scope: str | None, more: PutRows | None = None
    ) -> dict[str, Any]:
        """more: rows of other branches, which the record is to name"""
        self._tiers.flush()  # rows may be only in RAM
        scope = self._store.session(id, scope).scope
        self._shared.start_writing()  # before records are read whose rows may be named again
        model, folder = self._cold.coding.model(), self._session_folder(id, scope)
        here = session_history(self._store, model, id, scope)
        put = own = self._shared.put_path(here.ids(here.leaf), scope)
        listed = self._records(folder, scope)
        heads = self._heads(listed, scope).found
        history, contained = _union(model, here, heads)
        more = self._named([head for head in heads if head.text in contained], more or PutRows())
        others = list(more.rows)
        if history.leaf != here.leaf:  # it continued elsewhere
            others += put.rows
            put = self._shared.put_path(history.ids(history.leaf), scope)
        turns, texts = sorted(turn_digests(history)), {each.name.text for each in listed}
        text = self._text(b"".join(turns), scope)
        bases = {each.basis: each for each in (*more.transform_bases, *put.transform_bases)}
        record = SessionRecord(
            **self._common(PutRows(put.rows, list(bases.values()), put.checkpoints), scope),
            tower=session_file(self._store, model, history),
            turns=turns,
            contains=sorted((contained & texts) - {text}),
            others=sorted(set(others) - set(put.rows), key=lambda place: (place.p0, place.name)),
        )
        named = naming(
            [*put_of(record).objects, *PutRows(others).objects, *more.objects],
            turns,
            _branch(history),
        )
        self._put_record(folder, len(turns), text, record, scope, named)
        ids = here.ids(here.leaf)
        self._shared.kept(ids, scope, own)
        return {"session": id, "tokens": len(ids), "rows": min(put.n_tokens, len(ids))}

    def _named(self, heads: Sequence[Head], more: PutRows) -> PutRows:
        """`more`, and what records name of this model and is not about to go."""
        found = PutRows(list(more.rows), list(more.transform_bases), more.checkpoints)
        for record in (head.record for head in heads):
            if record.row_identity == self._store.state.digest:
                found.rows.extend((*record.rows, *record.others))
                found.transform_bases.extend(record.transform_bases)
        return self._shared.lasting(found)

    def _pull_session(self, id: str, scope: str) -> dict[str, Any]:
        since, what = self._store.deletions.watch(), f"session {id!r}"
        heads = self._heads(self._records(self._session_folder(id, scope), scope), scope)
        if not heads.found:
            raise heads.problem or _not_there(what)
        model, before = self._cold.coding.model(), self._leaf(id, scope)
        done, problem = [], None
        for head in heads.found:
            try:
                entered = import_session(
                    self._store, model, head.record.tower, tenant_of(scope), since
                )
                done.append((head.record, entered))
            except (
                InvalidRequest,
                SessionFrozen,
                ThawError,
            ) as error:  # the other branches may be sound
                problem = problem or error
        if not done:
            assert problem is not None
            raise problem
        own = [each for each in done if not each[1]["session"]["tokenizer"]]
        last, n_rows = (own or done)[-1][1], 0
        session = last["session"]
        for record, _ in own:
            path = scope_of(tenant_of(scope), record.adapters)
            ids = self._store.session_ids(id, session["scope"])
            n_rows = max(n_rows, self._fetch(record, ids, path, since))
        added = sum(entered["added"] for _, entered in own or done)
        is_branch = added > 0 and before is not None and before == session["leaf"]
        found = {"added": added, "branched": is_branch, "tokens": session["n_tokens"]}
        return {**last, **found, "rows": n_rows}

    def _leaf(self, id: str, scope: str) -> int | None:
        """The end of a session's current branch here, if there is one."""
        try:
            return self._store.session(id, tenant_of(scope)).leaf
        except NotFound:
            return None

    def _heads(self, listed: Sequence[NamedRecord], scope: str) -> Heads:
        def read(place: str) -> SessionRecord:
            return decode_record(self._shared.read_record(scope, place), SessionRecord)

        return read_heads(listed, read)

    # --- bases, on the thread -------------------------------------------------------------

    def _base(self, name: str, scope: str) -> Base:
        seen = (scope, public_of(scope))
        found = [
            base for base in self._store.bases.listing() if base.name == name and base.scope in seen
        ]
        if not found:
            raise NotFound(f"There is no base {name!r}: towerctl pin lists them.")
        return min(found, key=lambda base: seen.index(base.scope))

    def _push_base(self, base: Base, *, by_itself: bool = False) -> dict[str, Any]:
        """by_itself: a text that is there stays as old as it is, and a record that adds no rows is not put"""
        self._tiers.flush()
        ids = self._store.node(base.node).prefix_ids()
        put = self._shared.put_path(ids, base.scope)
        record = BaseRecord(
            **self._common(put, base.scope),
            name=base.name,
            level=base.level,
            tokenizer=self._store.state.identity.tokenizer_digest,
            ids=ids_bytes(ids),
            format=base.format,
            reuse=base.reuse,
        )
        folder = self._base_folder(base.name, base.scope)
        found, text = self._records(folder, base.scope), self._text(record.ids, base.scope)
        version = version_of(text, found, is_newest=not by_itself)
        model = self._shared.model_name(base.scope)
        known = [each.name for each in self._put_lately(found) if each.name.text == text]
        n_there = max((each.n_rows for each in known if each.model == model), default=0)
        if not (by_itself and known and put.n_tokens <= n_there):
            what = [text.encode()]
            named = naming(put_of(record).objects, what, what)
            self._put_record(folder, version, text, record, base.scope, named)
        self._shared.kept(ids, base.scope, put)
        return {"base": base.name, "tokens": len(ids), "rows": min(put.n_tokens, len(ids))}

    def _pull_base(self, name: str, scope: str, replace: bool) -> dict[str, Any]:
        found = self._records(self._base_folder(name, scope), scope)
        if not is_public(scope) and not found:
            return self._pull_base(name, public_of(scope), replace)
        record = self._record(found, scope, BaseRecord, f"base {name!r}")
        if record.tokenizer != self._store.state.identity.tokenizer_digest:
            raise InvalidRequest(
                f"The base {name!r} is of another tokenizer than the served model's: precache it here."
            )
        ids = ids_array(record.ids)
        own, place = scope_of(tenant_of(scope), record.adapters), (record.level, is_public(scope))
        if not replace and self._is_another(name, ids, public_of(own) if place[1] else own):
            raise InvalidRequest(
                f"The base {name!r} here has another text than the one in the shared tier: towerctl shared pull "
                f"--base {name} --replace takes that one."
            )
        self._store.bases.add(name, ids, own, *place, record.format, record.reuse == ANYWHERE)
        n_rows = self._fetch(record, ids, own)
        return {"base": name, "tokens": len(ids), "rows": n_rows}

    def _is_another(self, name: str, ids: Ids, scope: str) -> bool:
        """Whether a base of this name and scope is here, with other tokens than `ids`."""
        named = (each for each in self._store.bases.listing() if each.name == name)
        base = next((each for each in named if each.scope == scope), None)
        return base is not None and not np.array_equal(
            self._store.node(base.node).prefix_ids(), ids
        )

    # --- records, on the thread -----------------------------------------------------------

    def _session_folder(self, id: str, scope: str) -> str:
        return f"sessions/{self._shared.keys(scope).name('session', id.encode())}"

    def _base_folder(self, name: str, scope: str) -> str:
        digest = self._store.state.identity.tokenizer_digest
        return f"bases/{self._shared.keys(scope).name('base', digest, name.encode())}"

    def _common(self, put: PutRows, scope: str) -> dict[str, Any]:
        return {
            "version": VERSION,
            "row_identity": self._store.state.digest,
            "adapters": adapters_of(scope),
            "rows": put.rows,
            "transform_bases": put.transform_bases,
            "checkpoints": put.checkpoints,
        }

    def _text(self, data: bytes, scope: str) -> str:
        return short_name(self._shared.keys(scope), "text", data)

    def _put_lately(self, found: Sequence[NamedRecord]) -> list[NamedRecord]:
        """Those that need not be put again to stay."""
        with self._shared.held() as hold:
            now = hold.now() if found else None
        return [each for each in found if now is not None and now - each.modified < AGAIN]

    def _put_record(
        self,
        folder: str,
        version: int,
        text: str,
        record: SessionRecord | BaseRecord,
        scope: str,
        named: Naming,
    ) -> None:
        data, n_rows = encode(record), put_of(record).n_tokens
        content, model = (
            self._shared.keys(scope).name("record", data),
            self._shared.model_name(scope),
        )
        name = RecordName(version, text, model, n_rows, content)
        self._shared.put_record(scope, folder, name, data, named)

    def _records(self, folder: str, scope: str) -> list[NamedRecord]:
        """Those of a folder, the best for this daemon first. Raises BucketError."""
        return best_first(self._shared.bucket.listing(folder), self._shared.model_name(scope))

    def _record(self, listed: Sequence[NamedRecord], scope: str, kind: type[R], what: str) -> R:
        """The first record that is whole. Raises NotFound, BucketError."""
        if not listed:
            raise _not_there(what)
        problem: BucketError | None = None
        for each in listed[:_RECORDS_TRIED]:
            try:
                return decode_record(self._shared.read_record(scope, each.place), kind)
            except (ObjectDamaged, ObjectMissing) as error:
                problem = problem or error
            except StateError as error:
                problem = problem or BucketError(f"The record of {what} cannot be used: {error}.")
        assert problem is not None
        raise problem

    def _fetch(
        self, record: SessionRecord | BaseRecord, ids: Ids, scope: str, since: Any = None
    ) -> int:
        """Fetch the rows of a record, and those that others put of its tokens; returns the tokens that have some
        here."""
        put = put_of(record)
        try:
            if record.row_identity == self._store.state.digest:
                self._shared.fetch_path(put, ids, scope, since)
            n_stored = self._shared.n_stored(ids, scope)
            if n_stored < len(ids) - 1:  # the last token may have no row
                others = self._shared.find(ids, scope, n_stored)
                if others is not None:
                    self._shared.fetch_path(others.put, ids, scope, since)
        except TowerdError as error:  # what has come stays
            self._shared.counters.add(errors=int(isinstance(error, BucketError)))
            log.warning("rows were not fetched", extra={"error": error.message})
        return self._shared.n_stored(ids, scope)

    # --- by itself ------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(POLL_S, self._retry_s))
            try:
                while await self._do(self._put_leaving):
                    pass
                has_more = True
                while has_more and self._cold.idle_s() >= QUIET_S:
                    has_more = await self._do(self._put_next)
                self._retry_s = 0.0
            except Exception as error:  # no failure may end it
                said = error.message if isinstance(error, TowerdError) else repr(error)
                if not self._retry_s:
                    log.warning("nothing is put into the shared tier now", extra={"error": said})
                self._retry_s = min(RETRY_S_MAX, max(RETRY_S_MIN, 2 * self._retry_s))

    def _put_leaving(self) -> bool:
        """Put what leaves the disk next, if its space is short; False if there is nothing. Raises BucketError."""
        share = LEAVING_SHARE if self._cold.idle_s() >= QUIET_S else PRESSED_SHARE
        try:
            return self._leaving.put_next(int(share * self._tiers.warm_bytes_max))
        except BucketError:
            raise
        except TowerdError as error:  # of one file
            log.warning("not put into the shared tier", extra={"error": error.message})
            return True

    def _put_next(self) -> bool:
        """Put the next base or pinned session that is not in the bucket as it is here; False if all are."""
        now = time.monotonic()
        self._put = {key: at for key, at in self._put.items() if now - at < AGAIN_S}
        for base in self._store.bases.listing():
            node = self._store.node(base.node)
            key: tuple[object, ...] = (
                "base",
                base.scope,
                base.name,
                base.digest,
                self._files(node.prefix_ids(), base.scope),
            )
            if key not in self._put:
                self._put_one(key, partial(self._push_base, base, by_itself=True))
                return True
        for node in self._store.pins.listing():
            found = self._store.session_beyond(node, 0, tenant_of(node.scope))
            if found is None:
                continue
            info = self._store.session(found[0], tenant_of(node.scope))
            key = ("session", info.scope, info.id, info.updated, info.n_turns)
            if key not in self._put:
                self._put_one(key, partial(self._push_session, info.id, info.scope))
                return True
        return False

    def _put_one(self, key: tuple[object, ...], work: Callable[[], object]) -> None:
        """Put something; what cannot be put is passed over for a while. Raises BucketError."""
        try:
            work()
        except BucketError:  # others may not fail
            self._put[key] = time.monotonic() - AGAIN_S + RETRY_S_MAX
            raise
        except TowerdError as error:
            said = {"what": str(key[2]), "error": error.message}
            log.warning("not put into the shared tier", extra=said)
        self._put[key] = time.monotonic()

    def _files(self, ids: Ids, scope: str) -> tuple[int, ...]:
        """The ids of the files with rows of a path."""
        with self._store.locked():
            nodes = self._store.match(ids, scope).nodes
            return tuple(node.file.id for node in nodes if node.file is not None)


def _told(named: NamedRecord) -> dict[str, Any]:
    """What a record's name says of it."""
    return {"rows": named.name.n_rows, "put": named.modified.timestamp()}


def _not_there(what: str) -> NotFound:
    return NotFound(
        f"The shared tier has no {what} for this tenant and key: put it there with towerctl shared push, where it is."
    )


def _union(
    model: SessionModel, history: History, heads: Sequence[Head]
) -> tuple[History, set[str]]:
    """A session with the turns of all records of its vocabulary, and the texts of records whose turns it has."""
    contained: set[str] = set()
    for head in heads:
        record = head.record
        if not record.turns or not {*record.turns} <= {*turn_digests(history)}:
            try:
                other = history_in(model, record.tower)
            except InvalidRequest as error:
                log.warning("a record cannot be used", extra={"error": error.message})
                continue
            if other is None:
                continue  # it stays beside this one
            history = merged(history, other)
        contained |= {head.text, *record.contains}
    return history, contained


def _branch(history: History) -> list[bytes]:
    """The digests of the turns of the current branch."""
    digests = turn_digests(history)
    return [digests[place] for place in history.branch()]
