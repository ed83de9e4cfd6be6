"""LATEM: two-level marking with predictions from attention (Stephan 2025, Algorithm 1, section 6.2).

The chat is a sequence of requests: for the positions that the last queries look at, and for their
messages. What is requested and not live is a miss and is fetched. Whole messages are evicted while
there are more than k_m of them; then each message drops tokens down to its share of the token slots.
On both levels, what was requested since the last choice is marked and spared until everything is
marked. In each such phase the first ceil(eps * k) victims are those with the latest predicted use,
the others are random unmarked ones.

A position is requested if it gets at least the mean of the attention of the last queries, which is
found out from the keys of all positions, live or not; no more are than fit, the most attended ones.
Its next use is predicted to be the sooner, the more attention it got per token since (a running
average, section 6.2). The printed equal shares k_t / k_m would leave the slots of short messages
empty, so slots that one message does not fill go to the others. The printed algorithm serves one
request at a time; a choice here serves all requests since the last one.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.retention.base import (
    SINK_DEFAULT,
    Indices,
    Keys,
    Mass,
    Positions,
    Recalling,
    RetentionConfig,
    Signal,
    View,
    top,
)
from towerd.retention.icecache import check_rows

Scores = npt.NDArray[np.float64]
_TOKENS_PER_MESSAGE = 32


@dataclass(frozen=True, slots=True)
class LatemConfig(RetentionConfig):
    messages_max: int = 8
    """k_m: messages between sink and window."""
    trust: float = 0.3
    """eps: the share of a phase's victims that predictions choose, in (0, 1)."""
    layer_step: int = 1
    """3: only every third layer says what is requested."""
    n_threads: int = 1
    """Threads that find it out; the result is the same with any number."""
    seed: int = 0
    """Of the random victims."""

    def __post_init__(self) -> None:
        RetentionConfig.__post_init__(self)
        if self.messages_max < 1 or not 0 < self.trust < 1:
            raise ValueError("LATEM needs room for one message and a trust between 0 and 1")
        if self.layer_step < 1 or self.n_threads < 1:
            raise ValueError("LATEM asks at least one layer, with at least one thread")

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        window = (budget - SINK_DEFAULT) // 4
        rest = budget - SINK_DEFAULT - window
        return cls(window=window, messages_max=max(1, rest // _TOKENS_PER_MESSAGE))


@dataclass(slots=True)
class MarkingPhase:
    """The marks of one cache and how many of its victims predictions have chosen."""

    marked: set[int] = field(default_factory=set)
    n_predicted: int = 0

    def victims(
        self, items: Positions, rates: Scores, n: int, quota: int, chance: np.random.Generator
    ) -> set[int]:
        """Choose `n` of `items` (ascending) to evict; they lose their marks.

        rates: attention per time, float64[len(items)]; the lowest is used last"""
        gone: set[int] = set()
        rate_of = dict(zip(items.tolist(), rates.tolist(), strict=True))
        while len(gone) < n:
            unmarked = [i for i in rate_of if i not in self.marked and i not in gone]
            if not unmarked:
                self.marked.clear()
                self.n_predicted = 0
                continue
            n_left = n - len(gone)
            by_rate = sorted(unmarked, key=lambda i: (rate_of[i], i))
            predicted = by_rate[: min(n_left, max(0, quota - self.n_predicted))]
            self.n_predicted += len(predicted)
            gone.update(predicted)
            if len(gone) < n:
                rest = [i for i in unmarked if i not in gone]
                gone.update(chance.permutation(rest)[: n - len(gone)].tolist())
        self.marked -= gone
        return gone

    def without(self, n: int) -> MarkingPhase:
        """A copy without marks from `n` on."""
        return MarkingPhase({i for i in self.marked if i < n}, self.n_predicted)

    def copy(self) -> MarkingPhase:
        return MarkingPhase(set(self.marked), self.n_predicted)


class Latem(Recalling):
    """Keeps the sink, the window, the messages in use, and in each of them the tokens in use."""

    signals = frozenset((Signal.MASS, Signal.MESSAGES, Signal.KEYS, Signal.QUERIES))

    config: LatemConfig

    def __init__(self, config: LatemConfig) -> None:
        super().__init__(config)
        self._messages = MarkingPhase()
        self._tokens: dict[int, MarkingPhase] = {}
        """The marks of each message's tokens."""
        self._starts: dict[int, int] = {}
        """The first position that was seen of each message."""
        self._totals: Scores = np.zeros(0, np.float64)
        """The attention that each position of the chat got so far."""
        self._chance = np.random.default_rng(config.seed)

    @property
    def n_bytes(self) -> int:
        return self._totals.nbytes

    def index_bytes(self, layers: int, kv_heads: int, head_size: int) -> int:
        return self._totals.itemsize

    def layers(self, n_layer: int) -> range:
        return range((n_layer - 1) % self.config.layer_step, n_layer, self.config.layer_step)

    def index(self, positions: Positions, keys: Keys, *, n_threads: int = 1) -> None:
        """It has none: each choice asks all keys."""

    def forget(self, positions: Positions) -> None:
        gone = set(positions.tolist())
        for phase in self._tokens.values():
            phase.marked -= gone

    def _check(self, view: View, n_max: int) -> None:
        super()._check(view, n_max)
        check_rows(view.keys, view.queries)

    def _choose_groups(self, view: View, span: slice, room: int, shape: tuple[int, int]) -> Indices:
        """All groups keep the same positions: marks and trust are of a message and its tokens."""
        chosen = self._chosen(view, span, room)
        return np.broadcast_to(chosen, (*shape, len(chosen)))

    def _chosen(self, view: View, span: slice, room: int) -> Indices:
        """`view.mass` is the attention since the last choice."""
        assert view.messages is not None
        positions, message = view.positions[span], view.messages[span]
        assert view.keys is not None
        asking = self.layers(view.keys.shape[0])
        recent = asked(view, asking, self.config.n_threads)[span]
        live = np.ones(len(positions), np.bool_) if view.live is None else view.live[span]
        rates = self._rates(view, span, recent, live)
        seen, first = np.unique(message, return_index=True)
        for m, p in zip(seen.tolist(), positions[first].tolist(), strict=True):
            self._starts.setdefault(m, p)
        is_asked = self._mark(positions, message, recent, room)
        stays = live | is_asked
        stays[stays] = ~np.isin(message[stays], self._message_victims(message[stays], rates[stays]))
        there, sizes = np.unique(message[stays], return_counts=True)
        for m, share in zip(there.tolist(), shares(sizes, room).tolist(), strict=True):
            mine = np.flatnonzero(stays & (message == m))
            stays[mine[self._token_victims(m, positions[mine], rates[mine], share)]] = False
        return np.flatnonzero(stays).astype(np.int64)

    def _rates(self, view: View, span: slice, recent: Mass, live: npt.NDArray[np.bool_]) -> Scores:
        """float64[length of span]: the attention that each position got for each token since. What is not
        live got none: what it would get now stands for it."""
        assert view.mass is not None
        self._totals = np.append(self._totals, np.zeros(max(0, view.n_seen - len(self._totals))))
        self._totals[view.positions] += view.mass
        positions = view.positions[span]
        self._totals[positions[~live]] += recent[~live]
        return np.asarray(self._totals[positions] / (view.ages[span] + 1), np.float64)

    def truncate(self, n: int) -> None:
        self._totals = self._totals[:n]
        self._starts = {m: start for m, start in self._starts.items() if start < n}
        end = max(self._starts, default=-1) + 1
        self._messages = self._messages.without(end)
        self._tokens = {m: phase.without(n) for m, phase in self._tokens.items() if m < end}

    def fork(self) -> Self:
        other = super().fork()
        other._starts = dict(self._starts)
        other._messages = self._messages.copy()
        other._tokens = {m: phase.copy() for m, phase in self._tokens.items()}
        other._totals = self._totals.copy()
        other._chance = copy.deepcopy(self._chance)
        return other

    def _mark(
        self, positions: Positions, message: Positions, recent: Mass, room: int
    ) -> npt.NDArray[np.bool_]:
        """bool[n]: the positions that are requested; they and their messages are marked."""
        scores = np.asarray(recent, np.float64)
        is_asked = np.zeros(len(scores), np.bool_)
        if not len(scores):
            return is_asked
        there, index = np.unique(message, return_inverse=True)
        sums = np.bincount(index, scores, len(there))
        self._messages.marked.update(there[sums >= sums.mean()].tolist())
        is_asked[top(np.asarray(recent, np.float32), room)] = True
        is_asked &= scores >= scores.mean()
        for m, p in zip(message[is_asked].tolist(), positions[is_asked].tolist(), strict=True):
            self._tokens.setdefault(m, MarkingPhase()).marked.add(p)
        return is_asked

    def _message_victims(self, message: Positions, rates: Scores) -> list[int]:
        live, index = np.unique(message, return_inverse=True)
        n_over = len(live) - self.config.messages_max
        if n_over <= 0:
            return []
        quota = math.ceil(self.config.trust * self.config.messages_max)
        sums = np.bincount(index, rates, len(live)).astype(np.float64)
        gone = self._messages.victims(live, sums, n_over, quota, self._chance)
        for m in gone:
            self._tokens.pop(m, None)
        return sorted(gone)

    def _token_victims(self, m: int, positions: Positions, rates: Scores, share: int) -> Indices:
        """Indices into `positions` of a message's tokens to evict."""
        n_over = len(positions) - share
        if n_over <= 0:
            return np.zeros(0, np.int64)
        phase = self._tokens.setdefault(m, MarkingPhase())
        quota = math.ceil(self.config.trust * share)
        gone = phase.victims(positions, rates, n_over, quota, self._chance)
        return np.flatnonzero(np.isin(positions, sorted(gone))).astype(np.int64)


def asked(view: View, asking: range, n_threads: int) -> Mass:
    """float32[n]: the attention that all positions, live or not, would get from the queries of a view,
    averaged over heads and the layers of `asking`."""
    keys, queries = view.keys, view.queries
    assert keys is not None
    assert queries is not None
    (_, kv_heads, n, size), m = keys.shape, queries.shape[2]
    group = queries.shape[1] // kv_heads
    total, every = np.zeros(n, np.float64), np.arange(n)
    n_seen, scale = np.full(m, n, np.int64), 1 / math.sqrt(size)
    for layer, head in itertools.product(asking, range(kv_heads)):
        rows = keys.read(layer, head, every)
        mine = queries[layer, head * group : (head + 1) * group]
        flat = np.ascontiguousarray(mine.transpose(1, 0, 2).reshape(m, group * size))
        (mass,) = dispatch.attention_mass(
            flat, rows.view(np.uint8), "f32", n_seen, size, scale, n_threads
        )
        total += mass
    return np.asarray(total / (len(asking) * queries.shape[1]), np.float32)


def shares(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """Slots for messages of `sizes` tokens: equal shares, but no message gets more than its tokens,
    and all of `room` is used if there are enough tokens. A remainder goes to the last messages."""
    dealt = np.zeros(len(sizes), np.int64)
    left = min(room, int(sizes.sum()))
    while left:
        hungry = np.flatnonzero(dealt < sizes)
        each = left // len(hungry)
        if each == 0:
            dealt[hungry[len(hungry) - left :]] += 1
            break
        more = np.minimum(sizes[hungry] - dealt[hungry], each)
        dealt[hungry] += more
        left -= int(more.sum())
    return dealt
