"""Visits: which requests used which keys last, and whether and when they returned.

A visit is one request as a policy sees it: the keys used at one moment, the last of them being its
end. It returns when a later visit uses its end; the later one continues its turn numbers. The
return-time model predicts from what is known of a visit: why answers ended, how long its
conversation was away, how long it is and how much of that is new, its turn, and how long the
answer took.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log, log1p
from typing import Any

import numpy as np

from towerd.policy.base import Key
from towerd.policy.predict.classes import VisitClass, bucket
from towerd.policy.predict.returns import ReturnModel, bin_of

AWAY_MAX = 20_000
"""Visits that may still return; beyond that the oldest counts as lost."""
_LEARN_EVERY = 128
_REFRESH_EVERY = 4
_REFRESHED = 1024
"""After every _REFRESH_EVERY lessons the last _REFRESHED visits are scored again."""
STOPS_MAX = 8
"""Stop reasons that are told apart; clients may send any text."""
_MEAN_VISITS = 100
"""Visits over which the mean length is taken, about."""
_TURNS_MAX = 8
_FIRST = "first"
_GAP_EDGES_S = (1.0, 3.0, 10.0, 30.0, 90.0)
_SERVICE_EDGES_S = (2.0, 4.0, 8.0, 16.0, 40.0)
_ALWAYS = 2 * STOPS_MAX
"""Features: why this answer and the one before ended (one-hot); from this index on: a constant 1;
whether it is answered, and how long that took; whether there were pauses before, and how long;
three lengths; whether it is the first turn, or the second, and the turn."""
_ANSWERED, _GAP, _GAP_BEFORE, _SIZES, _TURN = (_ALWAYS + n for n in (1, 3, 5, 7, 10))
N_FEATURES = _TURN + 3
_NO_FEATURES = array("d", [0.0] * _ALWAYS + [1.0] + [0.0] * (N_FEATURES - _ALWAYS - 1))
_SHARE_MIN, _SHARE_MAX = 1e-3, 1e3
_SIZE_MIN = 0.5 * log(_SHARE_MIN)
"""Lengths are clipped to these shares of the mean."""


@dataclass(slots=True, eq=False)
class Visit:
    """One request. before: how the visit that it continues ended; gap_s: how long its conversation
    was away; base_nbytes: what it shares with that visit."""

    start_s: float
    end: Key | None = None
    turn: int = 0
    before: str | None = None
    """Why the previous answer ended; None: there was none."""
    gap_s: float | None = None
    gap_before_s: float | None = None
    """`gap_s` of the previous visit."""
    nbytes: int = 0
    base_nbytes: int = 0
    new_before: int = 0
    """New bytes of the previous visit."""
    stop: str = ""
    answered_s: float | None = None
    ended: bool = False
    ended_from: Key | None = None
    """The inner key from which on it has ended; the ancestors of that key have not."""
    is_back: bool = False
    number: int | None = None
    """Its number in the model, once it is complete."""
    since_s: float = field(init=False)
    """When it became idle: when it was answered, or asked."""
    table: Sequence[float] | None = None
    """Its index by idle time; None: not computed yet."""

    def __post_init__(self) -> None:
        self.since_s = self.start_s


class Visits:
    """All visits that may return, and the model that learns from them."""

    def __init__(self) -> None:
        self.model = ReturnModel(N_FEATURES)
        self.current = Visit(float("-inf"))
        self.away: OrderedDict[Key, Visit] = OrderedDict()
        """Visits that have not returned yet, by end."""
        self.stops: list[str] = []
        """The known stop reasons; the index is the number."""
        self.mean_nbytes = 0.0
        self._n_new = self._n_lessons = self._n_before = 0

    def begin(self, now: float) -> Visit:
        """Start a new visit for the uses that follow, if `now` is a later time."""
        if now > self.current.start_s:
            self._close()
            self.current = Visit(now)
        return self.current

    def returned(self, key: Key, now: float) -> None:
        """The current visit uses `key`: if it is the end of an earlier visit, that one is back."""
        back, visit = self.away.get(key), self.current
        if back is None or back is visit:
            return
        del self.away[key]
        back.is_back = True
        if back.number is not None:
            self.model.returned(back.number, now)
        if back.turn >= visit.turn:
            visit.turn, visit.gap_s = back.turn + 1, max(0.0, now - back.since_s)
            visit.before, visit.base_nbytes = back.stop, back.nbytes
            visit.gap_before_s = back.gap_s
            visit.new_before = back.nbytes - back.base_nbytes

    def set_end(self, key: Key) -> None:
        """The current visit has used everything up to `key`."""
        self.current.end = key

    def split(self, lower: Key, upper: Key, *, upper_is_more: bool) -> None:
        """See Policy.split. The next turn of a conversation often diverges from the last input a
        few tokens before its end; the key that it continues from is then the end."""
        visit = self._find(lower)
        if visit is None or not upper_is_more:
            return
        visit.end = upper
        if visit is not self.current:
            del self.away[lower]
            self.away[upper] = visit

    def answered(self, key: Key, now: float, stop: str) -> None:
        visit = self._find(key)
        if visit is None or visit.answered_s is not None:
            return
        if stop not in self.stops and len(self.stops) < STOPS_MAX:
            self.stops.append(stop)
        visit.stop = stop if stop in self.stops else ""
        visit.answered_s = visit.since_s = max(now, visit.start_s)
        visit.table = None
        if visit.number is not None:
            self._tell_answer(visit, visit.number, visit.answered_s)

    def ended(self, key: Key) -> None:
        visit = self._find(key)
        if visit is not None:
            visit.ended = True

    def index(self, visit: Visit, now: float) -> float:
        """The value of a byte of this visit, as if it had not ended: returns per second."""
        if visit.table is None:
            self.score([visit])
            assert visit.table is not None
        return visit.table[bin_of(now - visit.since_s)]

    def score(self, visits: Sequence[Visit]) -> None:
        """Compute the tables of these visits from what is known now."""
        tables = self.model.tables(
            [self._class(visit) for visit in visits],
            np.frombuffer(b"".join([self.features(visit) for visit in visits])).reshape(
                len(visits), N_FEATURES
            ),
        )
        for visit, table in zip(visits, tables, strict=True):
            visit.table = table

    def features(self, visit: Visit, *, asked: bool = False) -> array[float]:
        """N_FEATURES numbers of magnitude about 1; asked: as they were before the answer."""
        x, stops = _NO_FEATURES[:], self.stops
        if visit.answered_s is not None and not asked:
            if visit.stop in stops:
                x[stops.index(visit.stop)] = 1.0
            x[_ANSWERED] = 1.0
            x[_ANSWERED + 1] = log1p(visit.answered_s - visit.start_s) / 2
        if visit.before in stops:
            x[STOPS_MAX + stops.index(visit.before)] = 1.0
        if visit.gap_s is not None:
            x[_GAP] = 1.0
            x[_GAP + 1] = log1p(visit.gap_s) / 2
        if visit.gap_before_s is not None:
            x[_GAP_BEFORE] = 1.0
            x[_GAP_BEFORE + 1] = log1p(visit.gap_before_s) / 2
        x[_SIZES] = self._size(visit.nbytes)
        x[_SIZES + 1] = self._size(visit.nbytes - visit.base_nbytes)
        x[_SIZES + 2] = self._size(visit.new_before)
        turn = visit.turn
        if turn < 2:
            x[_TURN + turn] = 1.0
        x[_TURN + 2] = turn / _TURNS_MAX if turn < _TURNS_MAX else 1.0
        return x

    def learned(self) -> Mapping[str, Any]:
        return {
            "returns": self.model.learned(),
            "stops": list(self.stops),
            "mean_nbytes": self.mean_nbytes,
        }

    def recall(self, learned: Mapping[str, Any]) -> None:
        """See Learning.recall. To be called before the first visit."""
        stops, mean_nbytes = list(learned["stops"]), float(learned["mean_nbytes"])
        if len(stops) > STOPS_MAX or not all(isinstance(stop, str) for stop in stops):
            raise ValueError("the stop reasons are damaged")
        if not 0.0 <= mean_nbytes < float("inf"):
            raise ValueError("the mean length is damaged")
        self.model.recall(learned["returns"])
        self.stops, self.mean_nbytes = stops, mean_nbytes
        self._n_before = _MEAN_VISITS if mean_nbytes else 0

    def _find(self, key: Key) -> Visit | None:
        return self.current if self.current.end == key else self.away.get(key)

    def _close(self) -> None:
        """The current visit is complete: start waiting for its return."""
        visit = self.current
        if visit.end is None:
            return
        visit.table = None
        visit.number = self.model.asked(
            self._class(visit, asked=True), self.features(visit, asked=True), visit.start_s
        )
        if visit.answered_s is not None:
            self._tell_answer(visit, visit.number, visit.answered_s)
        self.away[visit.end] = visit
        self.away.move_to_end(visit.end)
        self._n_before = min(_MEAN_VISITS, self._n_before + 1)
        self.mean_nbytes += (visit.nbytes - self.mean_nbytes) / self._n_before
        if len(self.away) > AWAY_MAX:
            self.away.popitem(last=False)
        self._n_new += 1
        if self._n_new >= _LEARN_EVERY:
            self._n_new = 0
            self.model.learn(visit.start_s)
            self._n_lessons += 1
            if self._n_lessons <= _REFRESH_EVERY or self._n_lessons % _REFRESH_EVERY == 0:
                self.score(list(islice(reversed(self.away.values()), _REFRESHED)))

    def _tell_answer(self, visit: Visit, number: int, answered_s: float) -> None:
        self.model.answered(number, self._class(visit), self.features(visit), answered_s)

    def _class(self, visit: Visit, *, asked: bool = False) -> VisitClass:
        """The class of a visit; asked: as it was before the answer."""
        gap = bucket(visit.gap_s, _GAP_EDGES_S)
        if asked or visit.answered_s is None:
            return VisitClass("?" + (_FIRST if visit.before is None else visit.before), gap)
        service = bucket(visit.answered_s - visit.start_s, _SERVICE_EDGES_S)
        return VisitClass(visit.stop, gap, service)

    def _size(self, nbytes: int) -> float:
        """A length on a logarithmic scale, 0 for the mean length of a visit."""
        share = nbytes / self.mean_nbytes if self.mean_nbytes > 0.0 else 1.0
        if share < _SHARE_MIN:
            return _SIZE_MIN
        return 0.5 * log(share if share < _SHARE_MAX else _SHARE_MAX)
