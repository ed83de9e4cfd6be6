"""The least cost of any two-level cache that follows LATEM's rules and knows the future.

The rules are those of Algorithm 1: every requested item must be cached, a token only with its
message, `slots` tokens per message. The search over all states is exact, for small instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Request: TypeAlias = tuple[int, int | None]
"""(message, token), or (message, None) for the message itself."""
State: TypeAlias = frozenset[tuple[int, frozenset[int]]]
"""The cached messages, each with its cached tokens."""
STATES_MAX = 200_000


def optimum_cost(requests: Sequence[Request], k_m: int, slots: int, token_cost: float) -> float:
    """The least cost of serving all requests from an empty cache. If a token is requested while its
    message is missing, the optimum may or may not cache the token as well. Raises ValueError
    when there are more states than STATES_MAX."""
    costs: dict[State, float] = {frozenset(): 0.0}
    for message, token in requests:
        after: dict[State, float] = {}
        for state, cost in costs.items():
            for step, new in _moves(dict(state), message, token, k_m, slots, token_cost):
                total = cost + step
                if total < after.get(new, float("inf")):
                    after[new] = total
        if len(after) > STATES_MAX:
            raise ValueError(f"{len(after)} states are too many")
        costs = after
    return min(costs.values())


def paging_cost(messages: Sequence[int], k_m: int) -> int:
    """The same for requests without tokens, by Belady's rule, which is exact and fast."""
    next_use: list[float] = []
    last: dict[int, int] = {}
    for i in range(len(messages) - 1, -1, -1):
        next_use.append(last.get(messages[i], float("inf")))
        last[messages[i]] = i
    held: dict[int, float] = {}
    cost = 0
    for message, then in zip(messages, reversed(next_use), strict=True):
        if message not in held:
            cost += 1
            if len(held) == k_m:
                del held[max(held, key=lambda each: held[each])]
        held[message] = then
    return cost


def _moves(
    held: dict[int, frozenset[int]],
    message: int,
    token: int | None,
    k_m: int,
    slots: int,
    token_cost: float,
) -> Iterable[tuple[float, State]]:
    """(cost, state) of all ways to serve one request."""
    if message in held:
        mine = held[message]
        if token is None or token in mine:
            yield 0.0, frozenset(held.items())
            return
        for kept in _with(mine, token, slots):
            yield token_cost, frozenset((held | {message: kept}).items())
        return
    tokens = [frozenset[int]()] if token is None else [frozenset[int](), frozenset([token])]
    victims: list[int | None] = list(held) if len(held) == k_m else [None]
    for victim in victims:
        rest = {m: t for m, t in held.items() if m != victim}
        for own in tokens:
            yield 1.0, frozenset((rest | {message: own}).items())


def _with(mine: frozenset[int], token: int, slots: int) -> Iterable[frozenset[int]]:
    """Possible sets of a message's tokens once `token` is added and another one evicted."""
    if len(mine) < slots:
        yield mine | {token}
        return
    for victim in mine:
        yield (mine - {victim}) | {token}
