"""SIEVE against a plain queue with a hand, and its tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from planted import planted

from lab.policies.sieve import Sieve


class Queue:
    """SIEVE as its paper prints it: newest first in a list, the hand goes from the end."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: list[int] = []
        self.marked: set[int] = set()
        self.hand: int | None = None

    def use(self, key: int) -> bool:
        """True for a hit."""
        if key in self.queue:
            self.marked.add(key)
            return True
        if len(self.queue) >= self.capacity:
            self._evict()
        self.queue.insert(0, key)
        return False

    def _evict(self) -> None:
        at = self.queue.index(self.hand) if self.hand is not None else len(self.queue) - 1
        while self.queue[at] in self.marked:
            self.marked.discard(self.queue[at])
            at = at - 1 if at > 0 else len(self.queue) - 1
        victim = self.queue[at]
        self.hand = self.queue[at - 1] if at > 0 else None
        self.queue.remove(victim)


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(1, 6))
def test_equals_the_queue_of_the_paper(keys: list[int], capacity: int) -> None:
    """Without a tree the same keys are in the cache after every use."""
    queue, sieve = Queue(capacity), planted(Sieve)
    for now, key in enumerate(keys):
        if not queue.use(key) and len(sieve) >= capacity:
            for victim in sieve.victims(1, lambda key: True):
                sieve.remove(victim)
        if key in sieve:
            sieve.access(key, now)
        else:
            sieve.insert(key, 1, now, None)
        assert {key for key in range(10) if key in sieve} == set(queue.queue)


def test_what_was_used_stays_once() -> None:
    """A mark saves a key from one pass of the hand."""
    sieve = planted(Sieve)
    for key in (1, 2, 3):
        sieve.insert(key, 1, float(key), None)
    sieve.access(1, 4.0)
    assert sieve.victims(3, lambda key: True) == [2, 3, 1]
    assert sieve.victims(1, lambda key: key != 2) == [3]


def test_parents_stay() -> None:
    """Inner keys are passed over."""
    sieve = planted(Sieve)
    sieve.insert(1, 1, 1.0, None)
    sieve.insert(2, 1, 2.0, 1)
    sieve.insert(3, 1, 3.0, None)
    assert sieve.victims(3, lambda key: True) == [2, 3, 1]
