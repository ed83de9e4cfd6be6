"""LATEM: learning-augmented two-level marking (Stephan, Algorithm 1), and a repaired form.

A message cache of k_m messages and a token cache of k_t tokens; a token may only be cached with
its message, and each cached message has k_t' = floor(k_t / k_m) slots of its own. Both levels
mark items on use and evict unmarked ones. In each phase (until all are marked) the first
ceil(eps * k) evictions follow the predicted next use; the others are arbitrary, here random.

In the printed form, a use of a token marks only the token, so a message that is used through its
tokens alone looks idle and is evicted (line 28), and a token whose message is missing is not cached
when its message is fetched (line 25). The repaired form marks the message with every use
of its tokens, and caches the requested token. `shared_pool` lets all messages share
the k_t tokens: without it, a message whose tokens are requested in turn always misses with
k_t' slots, even if the other messages use none, so the bound of Theorem 1 only holds against an
optimum under the same equal allocation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from lab.policies.latem import Trust

Message: TypeAlias = int
Token: TypeAlias = tuple[int, int]
"""(message, token)."""
Item: TypeAlias = int | Token
NextUse: TypeAlias = Callable[[Item], float]
"""The predicted time of the next request for an item; inf: never."""


class Marking:
    """One level with marks: phases, quota, and the choice of a victim. O(slots) per eviction."""

    def __init__(self, n_slots: int, trust: Trust, next_use: NextUse, rng: random.Random) -> None:
        self.n_slots = n_slots
        self.trust = trust
        self._next_use = next_use
        self._rng = rng
        self._is_marked: dict[Item, bool] = {}
        self._n_predicted = 0
        self._gone: set[Item] = set()
        """Number of victims in this phase that predictions chose."""
        self._was_wrong = False

    def __contains__(self, item: Item) -> bool:
        return item in self._is_marked

    def __len__(self) -> int:
        return len(self._is_marked)

    def items(self) -> list[Item]:
        """The cached items."""
        return list(self._is_marked)

    @property
    def is_full(self) -> bool:
        return len(self._is_marked) >= self.n_slots

    def mark(self, item: Item) -> None:
        """Mark a cached item as used."""
        self._is_marked[item] = True

    def add(self, item: Item) -> Item | None:
        """Cache and mark `item`. Returns the evicted item, if any."""
        if item in self._gone:
            self._gone.discard(item)
            self._was_wrong = True
            self.trust.was_wrong()
        victim = self._victim() if self.is_full else None
        if victim is not None:
            del self._is_marked[victim]
        self._is_marked[item] = True
        return victim

    def discard(self, item: Item) -> None:
        """Remove `item` for a reason outside this cache."""
        self._is_marked.pop(item, None)

    def _victim(self) -> Item:
        if all(self._is_marked.values()):
            self._begin_phase()
        unmarked = [item for item, marked in self._is_marked.items() if not marked]
        if self._n_predicted < self.trust.quota(self.n_slots):
            self._n_predicted += 1
            victim = max(unmarked, key=self._next_use)
            self._gone.add(victim)
            return victim
        return self._rng.choice(unmarked)

    def _begin_phase(self) -> None:
        if self._n_predicted and not self._was_wrong:
            self.trust.was_right()
        self._is_marked = dict.fromkeys(self._is_marked, False)
        self._n_predicted = 0
        self._was_wrong = False
        self._gone.clear()


class LatemCache:
    """The two-level cache. `message` and `token` serve a request and return its cost: 1 for a
    message that is missing, `token_cost` (beta) for a missing token of a cached message, else 0."""

    def __init__(
        self,
        k_m: int,
        k_t: int,
        next_use: NextUse,
        *,
        eps: tuple[float, float] = (0.3, 0.3),
        token_cost: float = 0.5,
        is_repaired: bool = True,
        shared_pool: bool = False,
        seed: int = 0,
    ) -> None:
        if k_m < 1 or k_t < 1:
            raise ValueError(f"there cannot be {k_m} messages and {k_t} tokens")
        if not 0 < token_cost < 1:
            raise ValueError(f"token_cost is {token_cost}, not between 0 and 1")
        self.token_cost = token_cost
        self.is_repaired = is_repaired
        self._eps = eps
        self._next_use = next_use
        self._rng = random.Random(seed)
        self.slots_per_message = max(1, k_t // k_m)
        self.messages = Marking(k_m, Trust(*eps), next_use, self._rng)
        self._shared = self._token_cache(k_t) if shared_pool else None
        self._tokens: dict[Message, Marking] = {}

    def message(self, m: Message) -> float:
        """Serve a request for a message."""
        if m in self.messages:
            self.messages.mark(m)
            return 0.0
        victim = self.messages.add(m)
        if isinstance(victim, int):
            self._forget(victim)
        return 1.0

    def token(self, m: Message, t: int) -> float:
        """Serve a request for a token of a message."""
        cost = 0.0
        if m not in self.messages:
            cost = self.message(m)
            if not self.is_repaired:
                return cost
        elif self.is_repaired:
            self.messages.mark(m)
        cache, item = self._cache_of(m), (m, t)
        if item in cache:
            cache.mark(item)
            return cost
        cache.add(item)
        return cost or self.token_cost

    def tokens(self) -> set[Token]:
        """All cached tokens."""
        caches = [self._shared] if self._shared is not None else list(self._tokens.values())
        return {item for cache in caches for item in cache.items() if isinstance(item, tuple)}

    def check_integrity(self) -> None:
        """Assert coherence (C_t within the cached messages), capacities, and equal allocation."""
        tokens = self.tokens()
        assert len(self.messages) <= self.messages.n_slots
        assert all(m in self.messages for m, _ in tokens), "a token outlived its message"
        for cache in [self._shared] if self._shared is not None else self._tokens.values():
            assert len(cache) <= cache.n_slots

    def _cache_of(self, m: Message) -> Marking:
        if self._shared is not None:
            return self._shared
        if m not in self._tokens:
            self._tokens[m] = self._token_cache(self.slots_per_message)
        return self._tokens[m]

    def _token_cache(self, n_slots: int) -> Marking:
        return Marking(n_slots, Trust(*self._eps), self._next_use, self._rng)

    def _forget(self, m: Message) -> None:
        """Drop the tokens of an evicted message (line 20)."""
        if self._shared is None:
            self._tokens.pop(m, None)
            return
        for item in [each for each in self._shared.items() if isinstance(each, tuple)]:
            if item[0] == m:
                self._shared.discard(item)
