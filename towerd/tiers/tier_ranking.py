"""TierRanking: the eviction policy of one tier, told of uses and of rows that come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from towerd.policy import Key, Policy

_STEP_S = 1e-6
"""Spacing of events with the same clock time."""
_EXPECTED_S_MAX = 60.0
"""Rows that have not arrived after this time are no longer expected."""
_NO_USE_S = float("-inf")
"""The time of a split, which is not a use; the visit that follows it is."""


class TierRanking:
    """Not thread-safe; the ranking's lock guards it."""

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.now = float("-inf")
        """Time of the last event."""
        self._clock = clock
        self._expected: OrderedDict[Key, tuple[float, int]] = OrderedDict()
        """Node -> the time since which its rows are expected, and their bytes."""

    def __contains__(self, key: Key) -> bool:
        return key in self.policy

    def visit(
        self, path: Sequence[Key], new: Mapping[Key, tuple[int, bool]], arrived_s: float
    ) -> None:
        """A request used `path`. new: the bytes of those that were not known, and whether they are
        there or expected."""
        policy = self.policy
        now = self.now = max(arrived_s, self.now + _STEP_S)
        self.forget_expected()
        n_there = next((i for i, key in enumerate(path) if key not in policy), len(path))
        if n_there:
            policy.access(path[n_there - 1], now)
        for key in path[n_there:]:
            if key in policy:
                policy.access(key, now)
            elif key in new:
                nbytes, is_there = new[key]
                policy.insert(key, nbytes, now)
                if not is_there:
                    self._expected[key] = self._clock(), nbytes

    def split(self, lower: Key, upper: Key, nbytes: int, n_upper: int, n_lower: int) -> None:
        """`upper` took `n_upper` tokens of `lower`, which has `n_lower` left. nbytes: of its rows,
        if they are there."""
        if lower in self._expected:
            since, whole = self._expected[lower]
            nbytes = whole * n_upper // (n_upper + n_lower)
            self._expected[upper] = since, nbytes
            self._expected[lower] = since, whole - nbytes
        self.policy.split(lower, upper, nbytes, _NO_USE_S)

    def arrive(self, sizes: Sequence[tuple[Key, int]], used: float | None = None) -> None:
        """Rows are there, of these bytes. used: when they were, unless they are known; None: with
        the last event."""
        if used is None:
            used = self._clock() if self.now == float("-inf") else self.now
        for key, nbytes in sizes:
            self._expected.pop(key, None)
            if key in self.policy:
                self.policy.resize(key, nbytes)
            else:
                self.now = max(used, self.now)
                self.policy.insert(key, nbytes, self.now)

    def leave(self, key: Key) -> None:
        """The rows are gone."""
        self.policy.remove(key)
        self._expected.pop(key, None)

    def forget(self, key: Key) -> None:
        """The node is removed from the tree."""
        self.policy.forget(key)
        self._expected.pop(key, None)

    def answered(self, tip: Key, now: float, stop: str) -> None:
        """See Policy.answered."""
        self.now = max(now, self.now)
        self.policy.answered(tip, self.now, stop)

    def victims(
        self,
        bytes_needed: int,
        is_evictable: Callable[[Key], bool],
        frees: Callable[[Key], int] | None = None,
    ) -> list[Key]:
        """See Policy.victims. Rows that are expected stay."""
        self.forget_expected()
        expected = self._expected
        return self.policy.victims(
            bytes_needed, lambda key: key not in expected and is_evictable(key), frees
        )

    def is_expected(self, key: Key) -> bool:
        """Whether the rows have still to come."""
        return key in self._expected

    def forget_expected(self) -> None:
        """Forget the rows that did not come in time."""
        due = self._clock() - _EXPECTED_S_MAX
        while self._expected and next(iter(self._expected.values()))[0] < due:
            key, _ = self._expected.popitem(last=False)
            self.policy.remove(key)

    def check_integrity(self, there: Mapping[Key, int]) -> None:
        """AssertionError unless the policy knows these rows, with these bytes, and the expected
        ones."""
        expected = {key: nbytes for key, (_, nbytes) in self._expected.items()}
        assert not there.keys() & expected.keys(), "rows are expected and there"
        self.policy.check_integrity({**there, **expected})
