"""The policy protocol: events in, victims out.

A policy sees keys (node ids), sizes and times, never tokens or rows, so the daemon and a trace
replayer run the same code over their trees. It does no I/O and reads no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

Key: TypeAlias = int


class Tree(Protocol):
    """The prefix tree as policies read it, whatever tier its nodes are in. It may have changed
    since the event that a policy is told of; then it says what is now."""

    def parent(self, key: Key) -> Key | None:
        """The node above; None for the first of a path and for a node that is unknown."""
        ...

    def children(self, key: Key) -> Iterable[Key]:
        """The nodes right below, the newest first."""
        ...


class Policy(Protocol):
    """Chooses what to evict from one tier. It is made for one Tree, of which some keys are in the
    tier: a node is useless without its ancestors, so a parent is never chosen before those of its
    children that are in the policy.

    Times need not be exact; a time earlier than the latest one seen counts as the latest one.
    Several uses of a key at the same time count as one."""

    def insert(self, key: Key, nbytes: int, now: float) -> None:
        """`key` is in the tier from now on. Counts as an access. If it is in the tier already, its
        size changes."""
        ...

    def access(self, key: Key, now: float) -> None:
        """`key` and all its ancestors were used. Unknown keys are ignored."""
        ...

    def remove(self, key: Key) -> None:
        """`key` left the tier. Unknown keys are ignored."""
        ...

    def forget(self, key: Key) -> None:
        """`key` leaves the tree, and with it the tier."""
        ...

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """`upper` took the first `upper_nbytes` of `lower`, and is its parent. Counts as an
        access of `upper` if `now` is later than every earlier time. Ignored if `lower` is
        unknown."""
        ...

    def answered(self, key: Key, now: float, stop: str) -> None:
        """The request whose input ends with `key` was answered; `stop` is why the answer ended,
        such as `tool_use`, or "". An optional event: a policy may ignore it, and must work well
        without it."""
        ...

    def ended(self, key: Key, now: float) -> None:
        """The last user of `key` will not continue from it. If `key` is a leaf, its conversation
        is over, with everything that no other conversation shares. If it is an inner key, it and
        its descendants are over, but its ancestors are not. An optional event."""
        ...

    def stepped(self, key: Key, now: float, workflow: str, agent: str) -> None:
        """The request whose input ends with `key` was a step of `agent` in `workflow`. An
        optional event. Names of one tenant never equal those of another."""
        ...

    def workflow_ended(self, workflow: str, now: float) -> None:
        """`workflow` has no further steps. An optional event; others may still use what its
        steps used."""
        ...

    def resize(self, key: Key, nbytes: int) -> None:
        """`key` takes `nbytes` now. Does not count as a use. Unknown keys are ignored."""
        ...

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        """Explains the rank of `key` to a person: `score`, `place` (how many keys are evicted
        before it; None if it has children), `used` (time of its last use) and what else the
        policy knows. Empty for unknown keys. Changes nothing."""
        ...

    def victims(
        self,
        bytes_needed: int,
        is_evictable: Callable[[Key], bool],
        frees: Callable[[Key], int] | None = None,
    ) -> list[Key]:
        """Keys to evict, in order, that free at least `bytes_needed`, or all evictable keys.
        frees: the bytes that the eviction of a key frees after that of the keys before it, for
        which it was called; None: the key's own. Changes nothing: the caller removes the keys that
        it actually evicts."""
        ...

    def lowest(
        self,
        nbytes: int,
        is_evictable: Callable[[Key], bool],
        frees: Callable[[Key], int] | None = None,
    ) -> list[Key]:
        """The keys that come first in the order of eviction, `nbytes` of them; none is about to be
        evicted. frees: see `victims`. Changes nothing."""
        ...

    def check_integrity(self, known: Mapping[Key, int] | None = None) -> None:
        """Raises AssertionError if leaves, sums and order disagree with the keys and the tree.
        known: the size that each key must have."""
        ...

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all keys."""
        ...


@runtime_checkable
class ReuseForecaster(Protocol):
    """A Policy that predicts which keys will be used again, whether they are in the tier or
    not."""

    def wanted(self, now: float, most: int) -> list[tuple[Key, float]]:
        """The last keys of the paths that are expected to be used, each with its value per byte
        (above 0, on the policy's own scale), highest first; empty while the forecasts are not
        trusted. most: the most keys to return. Changes nothing."""
        ...


@runtime_checkable
class Learning(Protocol):
    """A Policy, or a part of one, whose learned state is kept across restarts."""

    def learned(self) -> Mapping[str, Any]:
        """The learned state: JSON values of bounded size, without any keys."""
        ...

    def recall(self, learned: Mapping[str, Any]) -> None:
        """Continue from what `learned` returned. Raises ValueError, KeyError or TypeError for
        anything else; valid parts of it may have been applied by then."""
        ...
