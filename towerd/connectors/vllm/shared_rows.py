"""SharedRows: rows of the bucket that other engines share, fetched before a prompt is evaluated, and put there
once they are on disk. What it does takes as long as the network does, so that it has threads of its own."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from towerd.connectors.vllm.settings import ConnectorSettings
from towerd.errors import ConfigError, TowerdError
from towerd.store import Store
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.tiers.shared.tier import SharedTier

log = logging.getLogger(__name__)

WAIT_S_MAX = 10.0
"""A request waits no longer for the bucket."""
RETRY_S = 30.0
"""Until the bucket is asked again that has failed."""
LOOKUP_TOKENS = 256
"""A shorter rest of a prompt is not asked for."""


class SharedRows:
    """`has_ended` belongs to vLLM's scheduler; any thread may `put`."""

    def __init__(self, shared: SharedTier, tiers: Tiers) -> None:
        self._shared = shared
        self._tiers = tiers
        self._getting = ThreadPoolExecutor(1, "towerd-fetch")
        self._putting = ThreadPoolExecutor(1, "towerd-put")
        self._asked: dict[str, tuple[Future[None], float]] = {}
        self._retry_at = 0.0

    def has_ended(self, request_id: str, ids: Ids, scope: str, n_known: int) -> bool:
        """Whether the bucket has been asked for the rows of `ids` behind the first `n_known`; begins to ask if
        it was not. What it has is in the store then."""
        if request_id not in self._asked:
            if len(ids) - n_known < LOOKUP_TOKENS or time.monotonic() < self._retry_at:
                return True
            running = self._getting.submit(self._fetch, ids, scope, n_known)
            self._asked[request_id] = running, time.monotonic() + WAIT_S_MAX
        running, until = self._asked[request_id]
        if running.done():
            return True
        if time.monotonic() <= until:
            return False
        self._retry_at = time.monotonic() + RETRY_S  # else each prompt would wait as long
        return True

    def forget(self, request_id: str) -> None:
        """The request needs nothing more."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[0].cancel()

    def put(self, ids: Ids, scope: str) -> None:
        """Put what the disk has of `ids`, soon."""
        try:
            self._putting.submit(self._put, ids, scope)
        except RuntimeError:
            pass  # closed; the next engine that has these rows puts them

    def close(self) -> None:
        """Put what waits for it; nothing more after a request that fails."""
        self._getting.shutdown(wait=False, cancel_futures=True)
        self._putting.shutdown(wait=True)
        self._shared.bucket.close()

    def _fetch(self, ids: Ids, scope: str, n_known: int) -> None:
        if time.monotonic() < self._retry_at:
            return
        try:
            found = self._shared.find(ids, scope, n_known)
            if found is not None:
                self._shared.fetch_path(found.put, ids, scope, n_common=found.n_tokens)
        except TowerdError as error:
            self._rest("fetched", error)
        except Exception:
            log.exception("rows were not fetched")

    def _put(self, ids: Ids, scope: str) -> None:
        if time.monotonic() < self._retry_at:
            return
        try:
            self._tiers.flush()
            self._shared.put_path(ids, scope)
        except TowerdError as error:
            self._rest("put", error)
        except Exception:
            log.exception("rows were not put into the shared tier")

    def _rest(self, verb: str, error: TowerdError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self._shared.counters.add(errors=1)
        log.warning("rows of the shared tier were not %s: %s", verb, error.message)


def open_shared_rows(settings: ConnectorSettings, store: Store, tiers: Tiers) -> SharedRows | None:
    """The shared tier of these settings; None without one. Raises ConfigError."""
    if settings.shared is None:
        return None
    try:  # late: it takes packages that nothing else needs
        from towerd.tiers.shared.bucket import open_bucket
        from towerd.tiers.shared.sealing import master_key
        from towerd.tiers.shared.tier import SharedTier
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"towerd.shared needs the package {error.name}: pip install 'towerd[shared]'."
        ) from error
    bucket = open_bucket(settings.shared)
    key = master_key(settings.shared_key, settings.store_dir)
    return SharedRows(SharedTier(store, bucket, key, tiers.fidelity, has_rows=True), tiers)
