"""Indexer: adds positions that have left a chat's window to the index of its policy.

A prompt is evaluated in batches. The positions that one batch pushes out of the window are indexed
on a separate thread while llama.cpp evaluates the next batch: their keys are offloaded by then, and
no other thread touches the index. The rest is indexed when the policy has to choose.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.offloaded_rows import OffloadedKeys
from towerd.retention import Recalling

log = logging.getLogger(__name__)


class Indexer:
    """The indexes of one engine's chats. Called by the inference thread only."""

    def __init__(self, head_size: int, n_threads: int) -> None:
        """n_threads: threads that index while nothing else runs"""
        self.index_s = 0.0
        """Seconds spent indexing."""
        self.beside_s = 0.0
        """The part of `index_s` that ran beside an evaluation."""
        self._head_size = head_size
        self._n_threads = n_threads
        self._worker = ThreadPoolExecutor(1, "towerd-index")

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    def index(self, live_set: BoundedSet) -> None:
        """Index the offloaded positions of a chat that have left its window."""
        self.index_s += _index(live_set, 0, self._head_size, self._n_threads)

    @contextmanager
    def beside(self, chats: Iterable[tuple[BoundedSet, int]]) -> Iterator[None]:
        """Index these (chat, number of further tokens) while the body runs, which must not touch
        them. A failure is noted in the chat's `BoundedSet.failure`."""
        work: list[tuple[BoundedSet, Future[float]]] = []
        try:
            for live_set, n_more in chats:
                future = self._worker.submit(_index, live_set, n_more, self._head_size, 1)
                work.append((live_set, future))
        except RuntimeError as error:  # no thread can be started: the next choice indexes the rest
            log.warning("a prompt is not indexed beside", extra={"reason": str(error)})
        try:
            yield
        finally:
            for live_set, future in work:
                try:
                    seconds = future.result()
                except Exception as error:
                    live_set.failure = error
                else:
                    self.index_s += seconds
                    self.beside_s += seconds


def _index(live_set: BoundedSet, n_more: int, head_size: int, n_threads: int) -> float:
    """Index a chat, and return the seconds that it took."""
    started = time.perf_counter()
    policy, offloaded = live_set.policy, live_set.offloaded
    assert isinstance(policy, Recalling)
    span = policy.indexed(len(offloaded) + n_more)
    span = slice(span.start, min(span.stop, len(offloaded)))
    if len(offloaded):
        keys = OffloadedKeys(offloaded, head_size, span)
        policy.index(offloaded.positions[span], keys, n_threads=n_threads)
    return time.perf_counter() - started
