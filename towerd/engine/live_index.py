"""LiveIndex: the one place that is asked what of a prompt is live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from towerd.tokens import Ids, common_prefix


class Holder(Protocol):
    """What registers in a LiveIndex: a live sequence, a parked chat, a running request, a slot."""

    @property
    def ids(self) -> Ids:
        """int32 buffer that begins with its tokens."""
        ...

    @property
    def rank(self) -> Any:
        """Which of those that give equally many tokens is taken: the one of the highest rank, then
        the one that registered last."""
        ...

    def n_visible(self, scope: str) -> int:
        """How many of its first tokens a request of `scope` may share."""
        ...


T = TypeVar("T", bound=Holder)


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A request can continue after its first `n` tokens, which `source` holds; None if n is 0."""

    source: T | None = None
    n: int = 0
    n_common: int = 0
    """The most of its first tokens that any holder has, whether it can be continued there or not."""


class LiveIndex(Generic[T]):
    """The holders of one engine. Its methods are called by one thread."""

    def __init__(self, held: Iterable[T] = ()) -> None:
        self._held = dict.fromkeys(held)

    def __iter__(self) -> Iterator[T]:
        """In the order in which they registered."""
        return iter(self._held)

    def add(self, holder: T) -> None:
        """Register a holder, whose tokens may change while it is registered."""
        self._held[holder] = None

    def remove(self, holder: T) -> None:
        """Forget a holder."""
        del self._held[holder]

    def longest(
        self,
        ids: Ids,
        scope: str,
        among: Callable[[T], bool] = lambda _: True,
        usable: Callable[[T, int], int] = lambda _, n: n,
    ) -> Found[T]:
        """The holder that gives most of the first tokens of `ids` to a request of `scope`.

        among: the holders that count; usable: how many of the common tokens of one can be continued
        from. A look at one token passes over what is no better than what was found: the cost is that
        of a few whole comparisons, not one for each holder."""
        best, best_n, n_common = None, 0, 0
        worst_first = sorted(self._held, key=attrgetter("rank"))
        for each in reversed(worst_first):
            if best_n == len(ids):
                break
            if len(each.ids) <= best_n or each.ids.item(best_n) != ids.item(best_n):
                continue
            n = common_prefix(each.ids[: each.n_visible(scope)], ids) if among(each) else 0
            n_common = max(n_common, n)
            if n > best_n and (n := usable(each, n)) > best_n:
                best, best_n = each, n
        return Found(best, best_n, n_common)
