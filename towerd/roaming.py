"""Sessions and bases in the shared tier: put there, by hand or in idle time, and taken from there.

A session's record holds its `.tower` file and says which objects its rows are in; a base's holds its
tokens. Records are made anew after each turn, and the one with the most turns is taken. What is put by
itself are the bases and the sessions with pinned segments, which people said are worth keeping.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from towerd.cold import ColdTier
from towerd.errors import InvalidRequest, NotFound, TowerdError
from towerd.slots.errors import StateError
from towerd.store import Base, History, Store
from towerd.store.sessions.turn import ANYWHERE
from towerd.store.tree.scope import (
    adapters_of,
    is_public,
    public_of,
    scope_of,
    tenant_of,
)
from towerd.tiers.manager import Tiers
from towerd.tiers.shared.bucket import BucketError, ObjectDamaged, ObjectMissing
from towerd.tiers.shared.fetcher import Fetcher
from towerd.tiers.shared.naming import naming
from towerd.tiers.shared.objects import (
    VERSION,
    BaseRecord,
    PutRows,
    R,
    Record,
    SessionRecord,
    decode_record,
    encode,
)
from towerd.tiers.shared.records import (
    AGAIN,
    NamedRecord,
    RecordName,
    best_first,
    short_name,
    version_of,
)
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, ids_array, ids_bytes
from towerd.transfer import import_session, session_file, session_history

log = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_S = 5.0
"""Something is put by itself when no request has run for this long."""
POLL_S = 5.0
AGAIN_S = 3600.0
"""Time after which it is looked whether what was put is still there."""
RETRY_S_MIN = 10.0
RETRY_S_MAX = 600.0
_RECORDS_TRIED = 8
"""Of a session or base, the newest first, until one is whole."""


class Roaming:
    """The thread that talks with the bucket, and what is done there. Its coroutines belong to the event
    loop."""

    def __init__(self, shared: SharedTier, tiers: Tiers, cold: ColdTier) -> None:
        self._shared, self._tiers, self._cold = shared, tiers, cold
        self.fetcher = Fetcher(shared)
        self._store: Store = cold.store
        self._thread = ThreadPoolExecutor(1, "towerd-shared")
        self._task: asyncio.Task[None] | None = None
        self._put: dict[tuple[object, ...], float] = {}
        """What was put by itself, as it was then, and time.monotonic() of that."""
        self._retry_s = 0.0

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

    async def _do(self, work: Callable[..., T], *args: Any) -> T:
        def run() -> T:
            try:
                with self._shared.held():
                    return work(*args)
            except BucketError:
                self._shared.counters.add(errors=1)
                raise

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    # --- sessions, on the thread ----------------------------------------------------------

    def _push_session(self, id: str, scope: str | None) -> dict[str, Any]:
        self._tiers.flush()  # rows may be only in RAM
        scope = self._store.session(id, scope).scope
        model = self._cold.coding.model()
        history = session_history(self._store, model, id, scope)
        tower, ids = session_file(self._store, model, history), history.ids(history.leaf)
        put = self._shared.put_path(ids, scope)
        record = SessionRecord(**self._common(put, scope), tower=tower)
        place, texts = self._session_folder(id, scope), ids_bytes(history.stream)
        turns, branch = _turns(history)
        self._put_record(place, len(history.turns), texts, record, scope, turns, branch)
        return {"session": id, "tokens": len(ids), "rows": min(put.n_tokens, len(ids))}

    def _pull_session(self, id: str, scope: str) -> dict[str, Any]:
        since = self._store.deletions.watch()
        found = self._records(self._session_folder(id, scope), scope)
        record = self._record(found, scope, SessionRecord, f"session {id!r}")
        model = self._cold.coding.model()
        done = import_session(self._store, model, record.tower, tenant_of(scope), since)
        session, n_rows = done["session"], 0
        if not session["tokenizer"]:
            own = scope_of(tenant_of(scope), record.adapters)
            ids = self._store.session_ids(id, session["scope"])
            n_rows = self._fetch(record, ids, own, since)
        return {**done, "tokens": session["n_tokens"], "rows": n_rows}

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
            self._put_record(folder, version, record.ids, record, base.scope, what, what)
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
        text: bytes,
        record: Record,
        scope: str,
        turns: Iterable[bytes],
        branch: Iterable[bytes],
    ) -> None:
        """text: the bytes of its token ids; turns, branch: see Naming"""
        data, n_rows = encode(record), PutRows(record.rows).n_tokens
        content, model = (
            self._shared.keys(scope).name("record", data),
            self._shared.model_name(scope),
        )
        name = RecordName(version, self._text(text, scope), model, n_rows, content)
        objects = PutRows(record.rows, record.transform_bases).objects
        self._shared.put_record(scope, folder, name, data, naming(objects, turns, branch))

    def _records(self, folder: str, scope: str) -> list[NamedRecord]:
        """Those of a folder, the best for this daemon first. Raises BucketError."""
        return best_first(self._shared.bucket.listing(folder), self._shared.model_name(scope))

    def _record(self, listed: Sequence[NamedRecord], scope: str, kind: type[R], what: str) -> R:
        """The first record that is whole. Raises NotFound, BucketError."""
        if not listed:
            raise NotFound(
                f"The shared tier has no {what} for this tenant and key: put it there with "
                "towerctl shared push, where it is."
            )
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
        put = PutRows(record.rows, record.transform_bases)
        try:
            if record.row_identity == self._store.state.digest:
                self._shared.fetch_path(put, ids, scope, since)
            n_stored = self._shared.n_stored(ids, scope)
            if n_stored < len(ids) - 1:  # the last token may have no row
                others = self._shared.find(ids, scope, n_stored)
                if others is not None:
                    self._shared.fetch_path(others, ids, scope, since)
        except TowerdError as error:  # what has come stays
            self._shared.counters.add(errors=int(isinstance(error, BucketError)))
            log.warning("rows were not fetched", extra={"error": error.message})
        return self._shared.n_stored(ids, scope)

    # --- by itself ------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(POLL_S, self._retry_s))
            if self._cold.idle_s() < QUIET_S:
                continue
            try:
                has_more = True
                while has_more and self._cold.idle_s() >= QUIET_S:
                    has_more = await self._do(self._put_next)
                self._retry_s = 0.0
            except Exception as error:  # no failure may end it
                said = error.message if isinstance(error, TowerdError) else repr(error)
                if not self._retry_s:
                    log.warning("nothing is put into the shared tier now", extra={"error": said})
                self._retry_s = min(RETRY_S_MAX, max(RETRY_S_MIN, 2 * self._retry_s))

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


def _turns(history: History) -> tuple[list[bytes], list[bytes]]:
    """A digest of each turn of a session, and those of its current branch."""
    digests = [
        hashlib.blake2b(history.ids(place).tobytes(), digest_size=16).digest()
        for place in range(len(history.turns))
    ]
    branch, place = [], history.leaf if history.turns else None
    while place is not None:
        branch.append(digests[place])
        place = history.turns[place].parent
    return digests, branch
