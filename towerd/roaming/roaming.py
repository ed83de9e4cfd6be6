"""Roaming: the thread that puts sessions and bases into the shared tier, by hand or in idle time, and takes them from
there.

What is put by itself are the bases and the sessions with pinned segments, which people said are worth keeping, and what
is about to leave the disk for want of space.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from towerd.cold import ColdTier
from towerd.errors import TowerdError
from towerd.roaming.shared_bases import SharedBases
from towerd.roaming.shared_records import SharedRecords
from towerd.roaming.shared_sessions import SharedSessions
from towerd.store import Store
from towerd.store.tree.scope import is_public, public_of, tenant_of
from towerd.tiers.manager import PRESSED_SHARE, Tiers
from towerd.tiers.shared.bucket import BucketError
from towerd.tiers.shared.deleting.collector import Collected
from towerd.tiers.shared.fetcher import Fetcher
from towerd.tiers.shared.leaving import Leaving
from towerd.tiers.shared.tier import AGAIN_S, SharedTier
from towerd.tokens import Ids

log = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_S = 5.0
"""Something is put by itself when no request has run for this long."""
POLL_S = 5.0
LEAVING_SHARE = 0.8
"""From this share of the budget for rows on disk on, what leaves first is put, once nothing runs."""
RETRY_S_MIN = 10.0
RETRY_S_MAX = 600.0


class Roaming:
    """The thread that talks with the bucket, and what is done there. Its coroutines belong to the event
    loop."""

    def __init__(self, shared: SharedTier, tiers: Tiers, cold: ColdTier) -> None:
        self._shared, self._tiers, self._cold = shared, tiers, cold
        self.fetcher = Fetcher(shared)
        self._store: Store = cold.store
        self._records = SharedRecords(shared, self._store)
        of = shared, self._store, self._records
        self._sessions = SharedSessions(*of, cold.coding.model, tiers.flush)
        self._bases = SharedBases(*of, tiers.flush)
        self._leaving = Leaving(
            self._store,
            shared,
            tiers.evictor.least_valuable,
            self.fetcher.is_worth_putting,
            self._sessions.push,
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
        return await self._do(self._sessions.push, id, scope)

    async def push_base(self, name: str, scope: str) -> dict[str, Any]:
        """Put a base that the tenant of `scope` can use: `base`, `tokens` and those with `rows`. Raises NotFound or
        BucketError."""
        return await self._do(lambda: self._bases.push(self._bases.named(name, scope)))

    async def pull_session(self, id: str, scope: str) -> dict[str, Any]:
        """Take a session: as an import, and `tokens` and those with `rows` here. Raises NotFound, BucketError or
        what an import raises."""
        return await self._do(self._sessions.pull, id, scope)

    async def pull_base(self, name: str, scope: str, replace: bool = False) -> dict[str, Any]:
        """Take a base, the tenant's own or else a public one: `base`, `tokens` and those with `rows` here. Raises
        as `pull_session`, and InvalidRequest if one of another text has its name here and is not to be
        replaced."""
        return await self._do(self._bases.pull, name, scope, replace)

    async def remove_session(self, id: str, scope: str) -> dict[str, Any]:
        """Delete a session there: `session`, how many `records` it had, and whether this daemon `puts_again` what it has of it.
        Its rows go with a later `collect`, unless another record names them. Raises BucketError."""
        n = await self._do(self._remove, self._records.session_folder(id, scope))
        puts_again = await asyncio.to_thread(self._is_pinned, id, tenant_of(scope))
        return {"session": id, "records": n, "puts_again": puts_again}

    async def remove_base(self, name: str, scope: str) -> dict[str, Any]:
        """Delete a base there, the tenant's own or else a public one, as `remove_session`."""
        n, of = 0, [scope] if is_public(scope) else [scope, public_of(scope)]
        seen = {(base.name, base.scope) for base in self._store.bases.listing()}
        for own in of:
            n = await self._do(self._remove, self._records.base_folder(name, own))
            if n:
                return {"base": name, "records": n, "puts_again": (name, own) in seen}
        puts_again = any((name, own) in seen for own in of)
        return {"base": name, "records": n, "puts_again": puts_again}

    async def collect(self, older_than: timedelta | None, dry_run: bool) -> dict[str, Any]:
        """Take garbage one phase further; see Collector. Raises BucketError."""
        done = await self._do(partial(self._collector.run, older_than, dry_run=dry_run))
        if not dry_run:
            self._count(done)
        return asdict(done)

    async def listing(self, scope: str) -> dict[str, Any]:
        """What a tenant can pull: `sessions` and `bases`, those put last first. Raises BucketError."""
        return await self._do(self._records.listing, scope)

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
                self._put_one(key, partial(self._bases.push, base, by_itself=True))
                return True
        for id, tenant in self._pinned():
            info = self._store.session(id, tenant)
            key = ("session", info.scope, info.id, info.updated, info.n_turns)
            if key not in self._put:
                self._put_one(key, partial(self._sessions.push, info.id, info.scope))
                return True
        return False

    def _pinned(self) -> Iterator[tuple[str, str]]:
        """Ids and tenants of the sessions that reach furthest on the paths of pinned segments."""
        for node in self._store.pins.listing():
            tenant = tenant_of(node.scope)
            found = self._store.session_beyond(node, 0, tenant)
            if found is not None:
                yield found[0], tenant

    def _is_pinned(self, id: str, tenant: str) -> bool:
        return (id, tenant) in self._pinned()

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
