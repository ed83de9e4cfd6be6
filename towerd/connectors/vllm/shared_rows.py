"""SharedRows: rows of the bucket that other engines share, fetched before a prompt is evaluated, and put there
once they are on disk. What it does takes as long as the network does, so that it has threads of its own.

    towers/NAME    a record for the rows of some tokens: `towerctl shared gc` leaves what it names
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from towerd.connectors.vllm.settings import ConnectorSettings
from towerd.errors import TowerdError
from towerd.store import Store
from towerd.tiers.manager import Tiers
from towerd.tiers.shared.bucket import BucketError, open_bucket
from towerd.tiers.shared.deleting.free_place import AGAIN
from towerd.tiers.shared.fetcher import (
    FIND_S_MAX,
    FIRST_WAIT_S,
    MEASURED_TOKENS_MIN,
    RETRY_S_MAX,
    RETRY_S_MIN,
)
from towerd.tiers.shared.marks import MARK_TOKENS
from towerd.tiers.shared.naming import naming
from towerd.tiers.shared.objects import PutRows
from towerd.tiers.shared.records import TOWERS, RecordName, short_name
from towerd.tiers.shared.sealing import master_key
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, ids_bytes

log = logging.getLogger(__name__)

FETCHES_MAX = 4
"""Prompts that are looked up at once; others wait for one of these to end, but no longer than for the bucket."""
CLOSE_S = 10.0
"""At the end nothing more is put once nothing was for so long."""
CLOSE_S_MAX = 60.0
"""Nor after this time in any case."""
KNOWN_MAX = 10_000
"""Towers that are known to have a young record."""


class BucketBackoff:
    """Says when a bucket is left alone: after a failure, longer each time. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._span_s = self._began = self._until = 0.0

    def is_over(self) -> bool:
        """Whether it may be asked."""
        return self._clock() >= self._until

    def failed(self, asked_at: float) -> bool:
        """It failed, or was late. asked_at: the clock then; what was asked before the last failure is
        no other one. Returns whether it is one."""
        with self._lock:
            if asked_at < self._began:
                return False
            self._began = self._clock()
            self._span_s = min(RETRY_S_MAX, max(RETRY_S_MIN, 2 * self._span_s))
            self._until = self._began + self._span_s
            return True

    def worked(self) -> None:
        """It answered in time."""
        self._span_s = 0.0


@dataclass(slots=True, eq=False)
class _PromptFetch:
    ids: Ids
    scope: str
    n_known: int
    limit_s: float
    asked_at: float = field(default_factory=time.monotonic)
    is_found: bool = False
    is_late: bool = False

    @property
    def until(self) -> float:
        limit_s = self.limit_s if self.is_found else min(self.limit_s, FIND_S_MAX)
        return self.asked_at + limit_s


class SharedRows:
    """`has_fetched`, `forget` and `evaluated` belong to vLLM's scheduler; any thread may `put`."""

    def __init__(self, shared: SharedTier, tiers: Tiers) -> None:
        self._shared = shared
        self._tiers = tiers
        self._fetching = ThreadPoolExecutor(FETCHES_MAX, "towerd-fetch")
        self._putting = ThreadPoolExecutor(1, "towerd-put")
        self._fetches: dict[str, tuple[_PromptFetch, Future[bool]]] = {}
        self._fetch_backoff = BucketBackoff()
        self._put_backoff = BucketBackoff()
        self._n_put = 0
        self._is_closed = False
        self._tokens_per_s = 0.0
        """Of evaluation; 0: not measured."""
        self._known: OrderedDict[tuple[str, str], float] = OrderedDict()
        """time.monotonic() of when the record of a tower was seen or put, the oldest first."""

    def has_fetched(self, request_id: str, ids: Ids, scope: str, n_known: int) -> bool | None:
        """Whether rows of `ids` behind the first `n_known` have come from the bucket; begins to ask for them if that was
        not done. None: that may take longer. A prompt waits no longer than its evaluation takes, as far as
        that is known, and less until something is found."""
        if request_id not in self._fetches:
            if (
                len(ids) // MARK_TOKENS <= n_known // MARK_TOKENS
                or not self._fetch_backoff.is_over()
            ):
                return False
            limit_s = FIRST_WAIT_S
            if self._tokens_per_s:
                limit_s = (len(ids) - n_known) / self._tokens_per_s
            begun = _PromptFetch(ids, scope, n_known, limit_s)
            self._fetches[request_id] = begun, self._fetching.submit(self._fetch, begun)
        fetch, running = self._fetches[request_id]
        if running.done():
            return running.result()
        if fetch.is_late or time.monotonic() > fetch.until:
            fetch.is_late = True
            if not running.running():  # it waited for other prompts, not for the bucket
                return False
            if self._fetch_backoff.failed(fetch.asked_at):
                log.warning("the shared tier is slow: prompts are not looked up there for a while")
            return False
        return None

    def forget(self, request_id: str) -> None:
        """The request needs nothing more."""
        asked = self._fetches.pop(request_id, None)
        if asked is not None:
            asked[1].cancel()

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """Learn from a step how fast tokens are evaluated."""
        if n_tokens >= MEASURED_TOKENS_MIN and seconds > 0:
            speed = n_tokens / seconds
            self._tokens_per_s = (self._tokens_per_s + speed) / 2 if self._tokens_per_s else speed

    def put(self, ids: Ids, scope: str) -> None:
        """Put what the disk has of `ids`, and a record for it, soon."""
        self._soon(ids, scope, is_new=True)

    def used(self, ids: Ids, scope: str) -> None:
        """The rows of `ids` were loaded: put a record for them again, soon, if it may be a day old. It is of whole
        marks: prompts that leave a tower at many places would each leave a record."""
        self._soon(ids[: len(ids) // MARK_TOKENS * MARK_TOKENS], scope, is_new=False)

    def _soon(self, ids: Ids, scope: str, *, is_new: bool) -> None:
        try:
            self._putting.submit(self._put, ids, scope, is_new)
        except RuntimeError:
            pass  # closed; the next engine that has these rows puts them

    def close(self) -> None:
        """Put what waits for it; nothing more after a request that fails, once nothing was put for CLOSE_S, or after
        CLOSE_S_MAX."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fetching.shutdown(wait=False, cancel_futures=True)
        last, n_put = self._putting.submit(lambda: None), -1
        until = time.monotonic() + CLOSE_S_MAX
        while not last.done() and n_put != self._n_put and time.monotonic() < until:
            n_put = self._n_put
            wait((last,), CLOSE_S)
        self._shared.bucket.close()
        self._putting.shutdown(cancel_futures=True)
        self._fetching.shutdown()

    def _fetch(self, fetch: _PromptFetch) -> bool:
        """On a thread: whether anything was fetched."""
        if fetch.is_late or not self._fetch_backoff.is_over():
            return False
        has_fetched = False
        try:
            found = self._shared.find(fetch.ids, fetch.scope, fetch.n_known)
            if found is not None and self._is_sooner(found.put, fetch):
                fetch.is_found = has_fetched = True
                self._shared.fetch_path(found.put, fetch.ids, fetch.scope, n_common=found.n_tokens)
            if not fetch.is_late:
                self._fetch_backoff.worked()
        except BucketError as error:
            self._failed("fetched", error, self._fetch_backoff, fetch.asked_at)
        except TowerdError as error:  # deleted meanwhile, or the disk is full
            log.warning("rows of the shared tier were not fetched: %s", error.message)
        except Exception:
            log.exception("rows of the shared tier were not fetched")
            self._fetch_backoff.failed(fetch.asked_at)
        return has_fetched

    def _is_sooner(self, found: PutRows, fetch: _PromptFetch) -> bool:
        """Whether fetching is expected to be sooner than evaluating; so it is while one of the speeds is not known."""
        bytes_per_s, n = self._shared.bytes_per_s(), len(fetch.ids)
        if not self._tokens_per_s or not bytes_per_s:
            return True
        lacking = (each for each in found.rows if fetch.n_known < each.p1 and each.p0 < n)
        n_tokens = min(found.n_tokens, n) - fetch.n_known
        return sum(each.n_bytes for each in lacking) / bytes_per_s < n_tokens / self._tokens_per_s

    def _put(self, ids: Ids, scope: str, is_new: bool) -> None:
        """On a thread."""
        began, key = time.monotonic(), (scope, self._name(ids, scope))
        known_at = self._known.get(key)
        is_young = known_at is not None and began - known_at < AGAIN.total_seconds()
        if not self._put_backoff.is_over() or (is_young and not is_new):
            return
        try:
            self._tiers.flush()
            with self._shared.held():  # what the record names does not go before it is there
                self._put_record(self._shared.put_path(ids, scope), ids, scope)
            self._known[key] = began
            self._known.move_to_end(key)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            self._n_put += 1
            self._put_backoff.worked()
        except BucketError as error:
            self._failed("put", error, self._put_backoff, began)
        except TowerdError as error:
            log.warning("rows were not put into the shared tier: %s", error.message)
        except Exception:
            log.exception("rows were not put into the shared tier")
            self._put_backoff.failed(began)

    def _put_record(self, put: PutRows, ids: Ids, scope: str) -> None:
        """Name what was put, so that it stays for as long as it is used."""
        ids = ids[: put.n_rows]
        if not len(ids):
            return
        keys, name = self._shared.keys(scope), self._name(ids, scope)
        tower = [bytes.fromhex(name)]
        content = keys.name("record", *(each.encode() for each in sorted(put.objects)))
        text = short_name(keys, "text", ids_bytes(ids))
        record = RecordName(1, text, self._shared.model_name(scope), len(ids), content)
        folder = f"{TOWERS}/{name}"
        named = naming(put.objects, tower, tower, way=self._shared.way(ids, scope, put))
        self._shared.put_record(scope, folder, record, b"", named)

    def _name(self, ids: Ids, scope: str) -> str:
        model = self._shared.model_name(scope).encode()
        return self._shared.keys(scope).name("tower", model, ids_bytes(ids))

    def _failed(
        self, verb: str, error: BucketError, backoff: BucketBackoff, asked_at: float
    ) -> None:
        self._shared.counters.add(errors=1)
        if backoff.failed(asked_at):
            log.warning("rows of the shared tier were not %s: %s", verb, error.message)


def open_shared_rows(
    url: str, settings: ConnectorSettings, store: Store, tiers: Tiers
) -> SharedRows:
    """The shared tier of these settings. Raises ConfigError."""
    bucket = open_bucket(url)
    key = master_key(settings.shared_key, settings.store_dir, store.vault)
    return SharedRows(SharedTier(store, bucket, key, tiers.fidelity, has_rows=True), tiers)
