"""Export and import of sessions as `.tower` files.

Coding takes seconds for a long session, so it runs on a separate thread: neither the event loop nor
the threads that record turns wait for it, and the store is locked only while catalog rows are
copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from towerd import tower_file
from towerd.cold.freezing import cold_history, thaw
from towerd.errors import InvalidRequest, NotFound
from towerd.store import Store
from towerd.store.prefix.scope import is_public, public_of
from towerd.tower_file import SessionModel

T = TypeVar("T")


class Transfer:
    """The thread that `.tower` files are read and written on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "transfer")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` on the thread; calls run one at a time, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def close(self) -> None:
        """Wait for the running work to end, and cancel what is queued."""
        self._thread.shutdown(cancel_futures=True)


def export_session(store: Store, model: SessionModel, id: str, scope: str | None) -> bytes:
    """A session as the bytes of a `.tower` file; a frozen session stays frozen. Raises NotFound,
    StoreError (several tenants have a session with this id), ThawError or TowerFileError."""
    history = cold_history(store, model.codec, id, scope) or store.history(id, scope)
    return tower_file.write(history, model)


def import_session(store: Store, model: SessionModel, data: bytes, scope: str) -> dict[str, Any]:
    """Enter the session of a `.tower` file for a tenant. Returns `session`, `added` (the number of
    turns that were not here) and `bases` (the precached prompts that it begins with, and whether
    each of them is here).

    Raises TowerFileError, InvalidRequest (another session has its id), ThawError (the session here
    is frozen and cannot be compared) or DiskFull."""
    if is_public(scope):
        raise InvalidRequest(
            "Sessions belong to a tenant, and 'public' is none: name another scope."
        )
    history = tower_file.read(data, model)
    with suppress(NotFound):
        thaw(store, model.codec, history.id, scope)
    added = store.add_history(history, scope)
    here = {base.digest for base in store.bases() if base.scope in (scope, public_of(scope))}
    return {
        "session": asdict(store.session(history.id, scope)),
        "added": added,
        "bases": [
            {"name": base.name, "n_tokens": base.n_tokens, "here": base.digest in here}
            for base in history.bases
        ],
    }
