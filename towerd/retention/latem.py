"""LATEM: two-level marking with predictions from attention (Stephan 2025, Algorithm 1, section 6.2).

Whole messages are evicted while there are more than k_m of them; then each message drops tokens
down to its share of the token slots. On both levels, what was used since the last eviction is
marked and spared until everything is marked. In each such phase the first ceil(eps * k) victims are
those with the latest predicted use, the others the oldest unmarked ones.

A position counts as used if it got at least the mean of the recent attention. Its next use is
predicted to be the sooner, the more attention it got per token since (a running average, section
6.2). The printed equal shares k_t / k_m would leave the slots of short messages empty, so slots
that one message does not fill go to the others. The printed algorithm serves one request at a time;
an eviction here serves all requests since the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from towerd.retention.base import (
    SINK_DEFAULT,
    Indices,
    Positions,
    Retention,
    RetentionConfig,
    Signal,
    View,
)

Scores = npt.NDArray[np.float64]
_TOKENS_PER_MESSAGE = 32


@dataclass(frozen=True, slots=True)
class LatemConfig(RetentionConfig):
    messages_max: int = 8
    """k_m: messages between sink and window."""
    trust: float = 0.3
    """eps: the share of a phase's victims that predictions choose, in (0, 1)."""

    def __post_init__(self) -> None:
        RetentionConfig.__post_init__(self)
        if self.messages_max < 1 or not 0 < self.trust < 1:
            raise ValueError("LATEM needs room for one message and a trust between 0 and 1")

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

    def victims(self, items: Positions, rates: Scores, n: int, quota: int) -> set[int]:
        """Choose `n` of `items` (ascending: oldest first) to evict; they lose their marks.

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
            rest = [i for i in unmarked if i not in gone]
            gone.update(rest[: n - len(gone)])
        self.marked -= gone
        return gone

    def without(self, n: int) -> MarkingPhase:
        """A copy without marks from `n` on."""
        return MarkingPhase({i for i in self.marked if i < n}, self.n_predicted)

    def copy(self) -> MarkingPhase:
        return MarkingPhase(set(self.marked), self.n_predicted)


class Latem(Retention):
    """Keeps the sink, the window, the messages in use, and in each of them the tokens in use."""

    signals = frozenset((Signal.MASS, Signal.RECENT, Signal.MESSAGES))

    config: LatemConfig

    def __init__(self, config: LatemConfig) -> None:
        super().__init__(config)
        self._messages = MarkingPhase()
        self._tokens: dict[int, MarkingPhase] = {}
        """The marks of each message's tokens."""
        self._starts: dict[int, int] = {}
        """The first position that was seen of each message."""

    def _choose(self, view: View, span: slice, room: int) -> Indices:
        assert view.messages is not None
        assert view.recent is not None
        assert view.mass is not None
        message, recent = view.messages[span], view.recent[span]
        rates = view.mass[span].astype(np.float64) / (view.ages[span] + 1)
        seen, first = np.unique(message, return_index=True)
        for m, p in zip(seen.tolist(), view.positions[span][first].tolist(), strict=True):
            self._starts.setdefault(m, p)
        self._mark(view.positions[span], message, recent)
        stays = ~np.isin(message, self._message_victims(message, rates))
        live, sizes = np.unique(message[stays], return_counts=True)
        for m, share in zip(live.tolist(), shares(sizes, room).tolist(), strict=True):
            mine = np.flatnonzero(stays & (message == m))
            stays[mine[self._token_victims(m, view.positions[span][mine], rates[mine], share)]] = 0
        return np.flatnonzero(stays).astype(np.int64)

    def truncate(self, n: int) -> None:
        self._starts = {m: start for m, start in self._starts.items() if start < n}
        end = max(self._starts, default=-1) + 1
        self._messages = self._messages.without(end)
        self._tokens = {m: phase.without(n) for m, phase in self._tokens.items() if m < end}

    def fork(self) -> Self:
        other = super().fork()
        other._starts = dict(self._starts)
        other._messages = self._messages.copy()
        other._tokens = {m: phase.copy() for m, phase in self._tokens.items()}
        return other

    def _mark(self, positions: Positions, message: Positions, recent: npt.ArrayLike) -> None:
        """Mark what got at least the mean of the recent attention."""
        scores = np.asarray(recent, np.float64)
        live, index = np.unique(message, return_inverse=True)
        sums = np.bincount(index, scores, len(live))
        self._messages.marked.update(live[sums >= sums.mean()].tolist() if len(live) else ())
        if not len(scores):
            return
        used = scores >= scores.mean()
        for m, p in zip(message[used].tolist(), positions[used].tolist(), strict=True):
            self._tokens.setdefault(m, MarkingPhase()).marked.add(p)

    def _message_victims(self, message: Positions, rates: Scores) -> list[int]:
        live, index = np.unique(message, return_inverse=True)
        n_over = len(live) - self.config.messages_max
        if n_over <= 0:
            return []
        quota = math.ceil(self.config.trust * self.config.messages_max)
        sums = np.bincount(index, rates, len(live)).astype(np.float64)
        gone = self._messages.victims(live, sums, n_over, quota)
        for m in gone:
            self._tokens.pop(m, None)
        return sorted(gone)

    def _token_victims(self, m: int, positions: Positions, rates: Scores, share: int) -> Indices:
        """Indices into `positions` of a message's tokens to evict."""
        n_over = len(positions) - share
        if n_over <= 0:
            return np.zeros(0, np.int64)
        phase = self._tokens.setdefault(m, MarkingPhase())
        gone = phase.victims(positions, rates, n_over, math.ceil(self.config.trust * share))
        return np.flatnonzero(np.isin(positions, sorted(gone))).astype(np.int64)


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
