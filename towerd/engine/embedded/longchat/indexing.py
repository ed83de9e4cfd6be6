"""Indexer: puts what has left the windows of chats into their policies' indexes.

A prompt goes through the context in batches, and what one batch pushes out of the window is indexed
while llama.cpp evaluates the next, on a thread of its own: the keys are on the shelf by then, and
nobody else touches the index. What is left is done when the policy has to choose.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from towerd.engine.embedded.longchat.live_set import BoundedSet
from towerd.engine.embedded.longchat.shelf import ShelfKeys
from towerd.retention import Recalling

log = logging.getLogger(__name__)


class Indexer:
    """The indexes of one engine's chats. Called by the inference thread only."""

    def __init__(self, head_size: int, n_threads: int) -> None:
        """n_threads: that index while nothing else runs"""
        self.index_s = 0.0
        """What indexing took altogether."""
        self.beside_s = 0.0
        """How much of it went on beside an evaluation."""
        self._head_size = head_size
        self._n_threads = n_threads
        self._worker = ThreadPoolExecutor(1, "towerd-index")

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    def index(self, retained: BoundedSet) -> None:
        """Index what of a chat's shelf has left the window."""
        self.index_s += _index(retained, 0, self._head_size, self._n_threads)

    @contextmanager
    def beside(self, chats: Iterable[tuple[BoundedSet, int]]) -> Iterator[None]:
        """Index these chats, each for so many more tokens, while the body runs; it must leave
        them alone. A chat that this fails for is told by `BoundedSet.failure`."""
        work: list[tuple[BoundedSet, Future[float]]] = []
        try:
            for retained, n_more in chats:
                future = self._worker.submit(_index, retained, n_more, self._head_size, 1)
                work.append((retained, future))
        except RuntimeError as error:  # no thread can be had: the next choice indexes what is left
            log.warning("a prompt is not indexed beside", extra={"reason": str(error)})
        try:
            yield
        finally:
            for retained, future in work:
                try:
                    seconds = future.result()
                except Exception as error:
                    retained.failure = error
                else:
                    self.index_s += seconds
                    self.beside_s += seconds


def _index(retained: BoundedSet, n_more: int, head_size: int, n_threads: int) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    policy, shelf = retained.policy, retained.shelf
    assert isinstance(policy, Recalling)
    span = policy.indexed(len(shelf) + n_more)
    span = slice(span.start, min(span.stop, len(shelf)))
    if len(shelf):
        keys = ShelfKeys(shelf, head_size, span)
        policy.index(shelf.positions[span], keys, n_threads=n_threads)
    return time.perf_counter() - started
