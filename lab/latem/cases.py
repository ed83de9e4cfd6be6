"""Small instances on which LATEM is compared with an exact optimum, and advice of any quality."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lab.latem.algorithm import Item
from lab.latem.optimum import Request, optimum_cost, paging_cost

TOKEN_COST = 0.5
Requests: TypeAlias = Sequence[Request]


@dataclass(frozen=True, slots=True)
class LatemCase:
    """A kind of instance. requests(rng): one instance; k_m, k_t: capacity in messages and tokens;
    is_paging: no tokens are requested."""

    requests: Callable[[random.Random], list[Request]]
    k_m: int
    k_t: int
    is_paging: bool = False

    def optimum(self, requests: Requests) -> float:
        """The least cost under the same allocation."""
        if self.is_paging:
            return float(paging_cost([message for message, _ in requests], self.k_m))
        return optimum_cost(requests, self.k_m, self.k_t // self.k_m, TOKEN_COST)


def _mixed(rng: random.Random) -> list[Request]:
    """A few messages are requested often and others rarely, as a whole or by a token."""
    messages = rng.choices(range(5), (8, 4, 3, 2, 2), k=60)
    return [(m, rng.choice((None, 0, 1, 2))) for m in messages]


def _in_turn(rng: random.Random) -> list[Request]:
    """One message more than fits, requested in turn: the adversary of Theorem 2."""
    return [(i % 17, None) for i in range(680)]


def _clean(rng: random.Random) -> list[Request]:
    """Every phase requests four new messages, then most of those of the phase before."""
    held, n_seen, requests = list(range(64)), 64, [(m, None) for m in range(64)]
    for _ in range(40):
        new = list(range(n_seen, n_seen + 4))
        n_seen += 4
        held = rng.sample(held, 60)
        requests += [(m, None) for m in (*new, *held)]
        held += new
    return list[Request](requests)


def _by_tokens(rng: random.Random) -> list[Request]:
    """One message is only requested by its tokens, others as a whole."""
    requests: list[Request] = []
    for i in range(60):
        requests += [(0, 0), (0, 1), (1 + i % 3, None)]
    return requests


CASES = {
    "mixed": LatemCase(_mixed, 3, 6),
    "in turn": LatemCase(_in_turn, 16, 16, is_paging=True),
    "clean messages": LatemCase(_clean, 64, 64, is_paging=True),
    "by tokens": LatemCase(_by_tokens, 3, 6),
}


class Advice:
    """Predicts the next use of an item at each use: correctly, or with probability `error` as an
    adversary does, who says late for soon and soon for late. An item that is never used again
    counts as used at the end. `at` is the number of the request that is being served."""

    def __init__(self, requests: Requests, error: float, rng: random.Random) -> None:
        self.at = 0
        self.total_error = 0.0
        """eta: the summed error of predicted times; that of tokens times TOKEN_COST."""
        self._uses: dict[Item, list[int]] = {}
        self._said: dict[Item, list[int]] = {}
        for i, (message, token) in enumerate(requests):
            self._uses.setdefault(message, []).append(i)
            if token is not None:
                self._uses.setdefault((message, token), []).append(i)
        for item, uses in self._uses.items():
            said = self._said[item] = []
            for now, then in zip(uses, (*uses[1:], len(requests)), strict=True):
                said.append(now + len(requests) - then if rng.random() < error else then)
                weight = 1.0 if isinstance(item, int) else TOKEN_COST
                self.total_error += weight * abs(said[-1] - then)

    def __call__(self, item: Item) -> float:
        """The prediction that was made at the item's last use."""
        uses = self._uses.get(item, [])
        n = bisect_right(uses, self.at)
        return float(self._said[item][n - 1]) if n else float("inf")
