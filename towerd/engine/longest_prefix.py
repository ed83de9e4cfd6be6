"""The longest prefix of a prompt among the tokens that something holds: the one place that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from towerd.tokens import Ids, common_prefix


class HoldsTokens(Protocol):
    """A live sequence, a parked chat, a job."""

    @property
    def ids(self) -> Ids:
        """int32 buffer; how much of it counts is told apart from it."""
        ...


T = TypeVar("T", bound=HoldsTokens)


def longest_prefix(
    held: Iterable[T],
    ids: Ids,
    n_shared: Callable[[T], int],
    n_usable: Callable[[T, int], int] = lambda _, n: n,
    rank: Callable[[T], Any] | None = None,
) -> tuple[T | None, int]:
    """The one of `held` that gives most of the first tokens of `ids`, and how many; (None, 0) if
    none gives any. Among equals the one of the highest rank, then the first.

    n_shared: how many leading tokens of one may be shared; n_usable: how many of the common ones can
    be continued from. A look at one token passes over what is no better than what was found: the
    cost is that of a few whole comparisons, not one for each."""
    best, best_n = None, 0
    for each in held if rank is None else sorted(held, key=rank, reverse=True):
        if best_n == len(ids):
            break
        if len(each.ids) <= best_n or each.ids.item(best_n) != ids.item(best_n):
            continue
        n = common_prefix(each.ids[: n_shared(each)], ids)
        n = n_usable(each, n) if n > best_n else 0
        if n > best_n:
            best, best_n = each, n
    return best, best_n
