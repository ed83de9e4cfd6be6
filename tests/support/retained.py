"""Retention policies as their papers write them, one element at a time, and random views."""

from __future__ import annotations

import math

import numpy as np

from lab.reference.array_keys import ArrayKeys
from towerd.retention import View
from towerd.retention.buzz import BuzzConfig
from towerd.retention.latem import LatemConfig, asked

_N_POSITIONS = 4096
_KEYS = np.random.default_rng(8).standard_normal((3, 1, _N_POSITIONS, 4), dtype=np.float32)


def keys_of(positions: np.ndarray) -> np.ndarray:
    """Keys [3 layers, 1 head, n, 4] that belong to their positions."""
    return _KEYS[:, :, positions % _N_POSITIONS]


def queries_of(seed: int) -> np.ndarray:
    """Two queries of two heads: [3, 2, 2, 4]."""
    return np.random.default_rng(seed).standard_normal((3, 2, 2, 4), dtype=np.float32)


def random_view(seed: int, n: int, *, n_messages: int = 5) -> View:
    """A view of n positions with gaps; every mass is distinct."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(2 * n + 8, n, replace=False)).astype(np.int64)
    return View(
        positions,
        n_seen=2 * n + 8,
        mass=(rng.permutation(n) + 1).astype(np.float32),
        recent=(rng.permutation(n) + 1).astype(np.float32),
        messages=np.sort(rng.integers(0, n_messages, n)).astype(np.int64),
        keys=ArrayKeys(keys_of(positions)),
        queries=queries_of(seed),
    )


def grown(view: View, kept: np.ndarray, n_new: int, seed: int) -> View:
    """What the chat of `view` looks like after `kept` stayed and `n_new` tokens came."""
    rng = np.random.default_rng(seed)
    new = np.arange(view.n_seen, view.n_seen + n_new, dtype=np.int64)
    assert view.messages is not None
    n = len(kept) + n_new
    message = view.messages[np.searchsorted(view.positions, kept)]
    last = int(view.messages.max(initial=0))
    positions = np.concatenate([kept, new])
    return View(
        positions,
        n_seen=view.n_seen + n_new,
        mass=(rng.permutation(n) + 1).astype(np.float32),
        recent=(rng.permutation(n) + 1).astype(np.float32),
        messages=np.concatenate([message, np.full(n_new, last + 1)]).astype(np.int64),
        keys=ArrayKeys(keys_of(positions)),
        queries=queries_of(seed),
    )


def recallable(view: View, kept: np.ndarray, n_new: int, seed: int) -> View:
    """What the chat of `view` looks like after `kept` stayed, the rest was offloaded and `n_new` tokens
    came."""
    after = grown(view, kept, n_new, seed)
    assert view.messages is not None
    assert after.messages is not None
    new = after.positions[len(kept) :]
    positions = np.concatenate([view.positions, new])
    live = np.isin(positions, np.concatenate([kept, new]))
    mass = np.random.default_rng(seed).random(len(positions), np.float32) * live
    messages = np.concatenate([view.messages, after.messages[len(kept) :]])
    return View(
        positions,
        n_seen=after.n_seen,
        mass=mass.astype(np.float32),
        messages=messages,
        keys=ArrayKeys(keys_of(positions)),
        queries=queries_of(seed),
        live=live,
    )


def streaming(view: View, n_max: int, sink: int) -> list[int]:
    """Evict the oldest token that is no sink until the rest fits."""
    cache: list[int] = view.positions.tolist()
    while len(cache) > n_max:
        del cache[sink]
    return cache


def h2o(view: View, n_max: int, sink: int, window: int) -> list[int]:
    """H2O's Algorithm 1, its eviction repeated: drop the lowest accumulated score outside the
    window (and outside the sink, if there is one)."""
    assert view.mass is not None
    cache: list[int] = view.positions.tolist()
    score = dict(zip(cache, view.mass.tolist(), strict=True))
    while len(cache) > n_max:
        middle = cache[sink : len(cache) - window]
        cache.remove(min(middle, key=lambda p: score[p]))
    return cache


def snapkv(view: View, n_max: int, sink: int, window: int, pool: int) -> list[int]:
    """SnapKV's listing: votes of the window's queries, max pooling, the top ones, the window."""
    assert view.recent is not None
    cache: list[int] = view.positions.tolist()
    if len(cache) <= n_max:
        return cache
    votes = pooled(view.recent.tolist()[sink : len(cache) - window], pool)
    order = sorted(range(len(votes)), key=lambda i: (votes[i], i), reverse=True)
    chosen = sorted(order[: n_max - sink - window])
    return cache[:sink] + [cache[sink + i] for i in chosen] + cache[len(cache) - window :]


def pooled(votes: list[float], width: int) -> list[float]:
    """The largest of `width` around each."""
    half = width // 2
    return [max(votes[max(0, i - half) : i + half + 1]) for i in range(len(votes))]


class Buzz:
    """Algorithms 1 and 2 of BUZZ over lists, with its remark 2."""

    def __init__(self, config: BuzzConfig) -> None:
        self.config = config
        self.old: list[int] = []

    def evict(self, view: View, n_max: int) -> list[int]:
        assert view.mass is not None
        k, w, s = self.config.sink, self.config.window, self.config.stride
        s_hat = (s + 1) // 2
        cache: list[int] = view.positions.tolist()
        if len(cache) <= n_max:
            return cache
        score = dict(zip(cache, view.mass.tolist(), strict=True))
        n_old = len(self.old)
        assert cache[k : k + n_old] == self.old
        new = cache[k + n_old : len(cache) - w]
        self.old = self.interval_sample(s_hat, self.old) + self.local_max_sample(s, new, score)
        room = n_max - k - w
        while len(self.old) > room // self.config.sampled_part:
            if room < self.config.sampled_part:
                self.old = []
            else:
                self.old = self.interval_sample(s_hat, self.old)
        middle = cache[k : len(cache) - w]
        votes = dict(zip(middle, pooled([score[p] for p in middle], self.config.pool), strict=True))
        others = [p for p in middle if p not in self.old]
        others.sort(key=lambda p: (votes[p], p), reverse=True)
        self.old = sorted(self.old + others[: n_max - k - w - len(self.old)])
        return cache[:k] + self.old + cache[len(cache) - w :]

    @staticmethod
    def interval_sample(stride: int, old: list[int]) -> list[int]:
        return [p for i, p in enumerate(old) if i % stride == 0]

    @staticmethod
    def local_max_sample(stride: int, new: list[int], score: dict[int, float]) -> list[int]:
        kept, idx = [], 0
        while idx < len(new):
            segment = new[idx : idx + stride]
            kept.append(max(segment, key=lambda p: score[p]))
            idx += stride
        return kept


def looked_at(view: View) -> np.ndarray:
    """float64[n]: the attention of all queries to each position, averaged over layers and heads."""
    assert view.keys is not None
    assert view.queries is not None
    layers, kv, n, size = view.keys.shape
    heads, m = view.queries.shape[1:3]
    found = np.zeros(n)
    for layer in range(layers):
        for h in range(heads):
            keys = view.keys.read(layer, h // (heads // kv), np.arange(n)).astype(np.float64)
            for i in range(m):
                scores = keys @ view.queries[layer, h, i].astype(np.float64) / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                found += weights / weights.sum() / (layers * heads)
    return found


class Latem:
    """Algorithm 1 of LATEM, one victim at a time, on the requests that one choice serves."""

    def __init__(self, config: LatemConfig) -> None:
        self.config = config
        self.marked_m: set[int] = set()
        self.pred_count_m = 0
        self.marked_t: dict[int, set[int]] = {}
        self.pred_count_t: dict[int, int] = {}
        self.totals: dict[int, float] = {}
        self.chance = np.random.default_rng(config.seed)

    def evict(self, view: View, n_max: int) -> list[int]:
        assert view.mass is not None
        assert view.messages is not None
        k, w = self.config.sink, self.config.window
        cache: list[int] = view.positions.tolist()
        if len(cache) <= n_max:
            return cache
        span = range(k, len(cache) - w)
        live = [view.live is None or bool(view.live[i]) for i in range(len(cache))]
        assert view.keys is not None
        looked = asked(view, range(view.keys.shape[0]), 1).tolist()
        for i, p in enumerate(cache):
            self.totals[p] = self.totals.get(p, 0.0) + float(view.mass[i])
            if not live[i] and i in span:
                self.totals[p] += looked[i]
        message = {cache[i]: int(view.messages[i]) for i in span}
        recent = {cache[i]: looked[i] for i in span}
        rate = {p: self.totals[p] / (view.n_seen - p) for p in message}
        wanted = self.mark(message, recent, n_max - k - w)
        tokens = {cache[i]: message[cache[i]] for i in span if live[i] or cache[i] in wanted}
        tokens = self.evict_messages(tokens, rate)
        tokens = self.evict_tokens(tokens, rate, n_max - k - w)
        return cache[:k] + sorted(tokens) + cache[len(cache) - w :]

    def mark(self, tokens: dict[int, int], recent: dict[int, float], room: int) -> set[int]:
        if not tokens:
            return set()
        of = {m: [p for p in tokens if tokens[p] == m] for m in set(tokens.values())}
        sums = {m: sum(recent[p] for p in of[m]) for m in of}
        self.marked_m |= {m for m in of if sums[m] >= sum(sums.values()) / len(sums)}
        mean = sum(recent.values()) / len(recent)
        most = sorted(tokens, key=lambda p: (recent[p], p), reverse=True)[:room]
        wanted = {p for p in most if recent[p] >= mean}
        for p in wanted:
            self.marked_t.setdefault(tokens[p], set()).add(p)
        return wanted

    def evict_messages(self, tokens: dict[int, int], rate: dict[int, float]) -> dict[int, int]:
        live = sorted(set(tokens.values()))
        sums = {m: sum(rate[p] for p in tokens if tokens[p] == m) for m in live}
        tau = math.ceil(self.config.trust * self.config.messages_max)
        drawn: list[int] = []
        while len(live) > self.config.messages_max:
            if all(m in self.marked_m for m in live):
                self.marked_m, self.pred_count_m, drawn = set(), 0, []
            unmarked = [m for m in live if m not in self.marked_m]
            if self.pred_count_m < tau:
                victim = min(unmarked, key=lambda m: (sums[m], m))
                self.pred_count_m += 1
            else:
                drawn = drawn or self.chance.permutation(unmarked).tolist()
                victim = drawn.pop(0)
            live.remove(victim)
            self.marked_t.pop(victim, None)
            self.pred_count_t.pop(victim, None)
            self.marked_m.discard(victim)
        return {p: m for p, m in tokens.items() if m in live}

    def evict_tokens(
        self, tokens: dict[int, int], rate: dict[int, float], room: int
    ) -> dict[int, int]:
        live = sorted(set(tokens.values()))
        of = {m: sorted(p for p in tokens if tokens[p] == m) for m in live}
        share = dict.fromkeys(live, 0)
        dealt = 0
        while dealt < min(room, len(tokens)):  # one slot each in turn, the last messages first
            hungry = [m for m in live if share[m] < len(of[m])]
            for m in hungry[max(0, len(hungry) - (min(room, len(tokens)) - dealt)) :]:
                share[m] += 1
                dealt += 1
        for m in live:
            self.evict_of_message(m, of[m], rate, share[m])
        return {p: m for m in live for p in of[m]}

    def evict_of_message(self, m: int, mine: list[int], rate: dict[int, float], k: int) -> None:
        tau = math.ceil(self.config.trust * k)
        drawn: list[int] = []
        while len(mine) > k:
            marked = self.marked_t.setdefault(m, set())
            if all(p in marked for p in mine):
                marked.clear()
                self.pred_count_t[m] = 0
                drawn = []
            unmarked = [p for p in mine if p not in marked]
            if self.pred_count_t.get(m, 0) < tau:
                victim = min(unmarked, key=lambda p: (rate[p], p))
                self.pred_count_t[m] = self.pred_count_t.get(m, 0) + 1
            else:
                drawn = drawn or self.chance.permutation(unmarked).tolist()
                victim = drawn.pop(0)
            mine.remove(victim)
            marked.discard(victim)
