"""LATEM's cost over the optimal cost, as advice goes from perfect to adversarial."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from lab.latem.algorithm import LatemCache
from lab.latem.cases import TOKEN_COST, Advice, LatemCase, Requests

ADAPTIVE = (0.05, 0.9)
"""Minimum and maximum trust of the adaptive form."""


@dataclass(frozen=True, slots=True)
class Point:
    """Means over instances of one case at one share of wrong advice. printed, repaired: cost /
    optimum by trust; consistency: Theorem 1's first bound without its additive term."""

    error: float
    printed: dict[float, float]
    repaired: dict[float, float]
    adaptive: float
    marking: float
    lru: float
    consistency: float


class TwoLevelLRU:
    """The same caches with LRU eviction at both levels."""

    def __init__(self, k_m: int, slots: int) -> None:
        self._k_m, self._slots = k_m, slots
        self._held: OrderedDict[int, OrderedDict[int, None]] = OrderedDict()

    def message(self, m: int) -> float:
        """See Latem.message."""
        cost = 0.0 if m in self._held else 1.0
        self._held.setdefault(m, OrderedDict())
        self._held.move_to_end(m)
        if len(self._held) > self._k_m:
            self._held.popitem(last=False)
        return cost

    def token(self, m: int, t: int) -> float:
        """See Latem.token."""
        cost = self.message(m)
        tokens = self._held[m]
        cost = cost or (0.0 if t in tokens else TOKEN_COST)
        tokens[t] = None
        tokens.move_to_end(t)
        if len(tokens) > self._slots:
            tokens.popitem(last=False)
        return cost


def curve(case: LatemCase, trusts: Sequence[float], errors: Sequence[float], n: int) -> list[Point]:
    """A Point for each share of wrong advice, over `n` instances."""
    instances = [case.requests(random.Random(seed)) for seed in range(n)]
    optima = [case.optimum(requests) for requests in instances]
    return [_point(case, trusts, error, instances, optima) for error in errors]


def robustness(case: LatemCase, trust: float) -> float:
    """Theorem 1's second bound: (4 H(k_m) + 4 beta H(k_t')) / eps."""
    slots = case.k_t // case.k_m
    return 4 * (harmonic(case.k_m) + TOKEN_COST * harmonic(slots)) / trust


def harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n"""
    return sum(1 / i for i in range(1, n + 1))


def total_cost(
    cache: LatemCache | TwoLevelLRU, requests: Requests, advice: Advice | None = None
) -> float:
    """The cost of all requests."""
    total = 0.0
    for i, (message, token) in enumerate(requests):
        if advice is not None:
            advice.at = i
        total += cache.message(message) if token is None else cache.token(message, token)
    return total


def _point(
    case: LatemCase,
    trusts: Sequence[float],
    error: float,
    instances: Sequence[Requests],
    optima: Sequence[float],
) -> Point:
    def latem(eps: tuple[float, float], *, is_repaired: bool = True) -> float:
        """Mean over the instances of cost / optimum."""
        paid = []
        for seed, (requests, least) in enumerate(zip(instances, optima, strict=True)):
            advice = Advice(requests, error, random.Random(seed))
            cache = LatemCache(
                case.k_m,
                case.k_t,
                advice,
                eps=eps,
                token_cost=TOKEN_COST,
                is_repaired=is_repaired,
                seed=seed,
            )
            paid.append(total_cost(cache, requests, advice) / least)
        return mean(paid)

    pairs = list(zip(instances, optima, strict=True))
    etas = [
        Advice(requests, error, random.Random(i)).total_error
        for i, (requests, _) in enumerate(pairs)
    ]
    return Point(
        error=error,
        printed={eps: latem((eps, eps), is_repaired=False) for eps in trusts},
        repaired={eps: latem((eps, eps)) for eps in trusts},
        adaptive=latem(ADAPTIVE),
        marking=mean(
            _marking(case, requests, i) / least for i, (requests, least) in enumerate(pairs)
        ),
        lru=mean(
            total_cost(TwoLevelLRU(case.k_m, case.k_t // case.k_m), r) / least for r, least in pairs
        ),
        consistency=mean(
            2 + math.sqrt(10 * eta / least) for eta, least in zip(etas, optima, strict=True)
        ),
    )


def _marking(case: LatemCase, requests: Requests, seed: int) -> float:
    """Plain marking: every victim is a random one of those without a mark."""
    rng = random.Random(seed)
    cache = LatemCache(
        case.k_m, case.k_t, lambda _: rng.random(), eps=(0.5, 0.5), token_cost=TOKEN_COST, seed=seed
    )
    return total_cost(cache, requests)
