"""The policy protocol: events in, victims out.

A policy sees keys (node ids), sizes and times, never tokens or rows, so the daemon and a trace
replayer run the same code. It does no I/O and reads no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

Key: TypeAlias = int


class Policy(Protocol):
    """What to evict from one tier. Keys form a tree: a node is useless without its parents, so
    a parent is never chosen before those of its children that are in the policy. In whatever
    order events come, no key ever stands on itself: a parent that would make it so is ignored.

    Times never need to be exact; one that lies before an earlier one counts as that one. What
    is used at the same time counts as one use of each key."""

    def insert(self, key: Key, nbytes: int, now: float, parent: Key | None) -> None:
        """`key` is in the tier from now on, below `parent` (which may be elsewhere). Counts as
        an access. A key that is in already only changes its size and parent."""
        ...

    def access(self, key: Key, now: float) -> None:
        """`key` was used, and with it its path. Unknown keys are ignored."""
        ...

    def remove(self, key: Key) -> None:
        """`key` left the tier. Unknown keys are ignored."""
        ...

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """`upper` took the first `upper_nbytes` of `lower` and is its parent now. Counts as an
        access of `upper`, if `now` is later than every time before. Ignored when `lower` is
        unknown."""
        ...

    def answered(self, key: Key, now: float, stop: str) -> None:
        """The request whose input ends with `key` was answered; `stop` is the reason why the
        answer ended, such as `tool_use`, or "". An optional event: a policy may ignore it, and
        must do well without it."""
        ...

    def ended(self, key: Key, now: float) -> None:
        """Whoever used `key` last will not go on from it. Of a leaf: its conversation is over,
        with everything that it has to itself; of an inner key: it and what stands on it are, and
        what is above goes on. An optional event."""
        ...

    def stepped(self, key: Key, now: float, workflow: str, agent: str) -> None:
        """The request whose input ends with `key` was a step of `agent` in `workflow`. An
        optional event. Names of one tenant never equal those of another."""
        ...

    def workflow_ended(self, workflow: str, now: float) -> None:
        """No step of `workflow` will follow. An optional event; what its steps used may still
        be used by others."""
        ...

    def resize(self, key: Key, nbytes: int) -> None:
        """`key` takes this much now; not a use. Unknown keys are ignored."""
        ...

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        """What the policy goes by for `key`, for people: `score`, `place` (how many go before
        it; None: others stand on it), `used` (time of its last use) and what else it knows.
        Empty for unknown keys. Changes nothing."""
        ...

    def victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """Keys to evict, in order, that free at least `bytes_needed`, or all there are. Changes
        nothing: the caller removes what it really evicted."""
        ...

    def check_integrity(self, known: Mapping[Key, tuple[Key | None, int]] | None = None) -> None:
        """AssertionError unless no key stands on itself, and leaves, sums and order agree with
        the keys. `known`: the parent and the size that each key must have."""
        ...

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all keys."""
        ...


@runtime_checkable
class Foretelling(Protocol):
    """A Policy that knows what it expects back, in the tier or not."""

    def wanted(self, now: float, most: int) -> list[tuple[Key, float]]:
        """The last keys of paths that are expected to be used and what a byte of each is worth
        (above 0, on the policy's own scale), the most first; none while the forecasts are not
        trusted. Changes nothing."""
        ...


@runtime_checkable
class Learning(Protocol):
    """A Policy, or a part of one, whose learned state is kept across restarts."""

    def learned(self) -> Mapping[str, Any]:
        """What it knows, of bounded size, as JSON has it. Says nothing about keys."""
        ...

    def recall(self, learned: Mapping[str, Any]) -> None:
        """Go on from what `learned` gave. Raises ValueError, KeyError or TypeError
        for anything else; what was sound of it may then be in force."""
        ...
