"""Visits: who used what last, and whether and when they came back.

A visit is one request as a policy sees it: the keys used at one moment, of which the last is its
tip. It returns when a later visit uses its tip; the later one goes on with its turn number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from towerd.policy.base import Key
from towerd.policy.predict.returns import ReturnModel, VisitClass, gap_bucket, turn_bucket

TIPS_MAX = 20_000
"""Visits that are waited for; beyond that the oldest counts as lost."""
_LEARN_EVERY = 128
_LEARN_SHARE = 8
"""The model learns again after this share of what is waited for is new: O(1) per visit."""
_STOPS_MAX = 8
"""Stop reasons told apart; clients may send any text."""
_LENGTHS = (0.4, 1.2)
_MEAN_WEIGHT = 0.01


class Visit:
    """One request. gap_s: how long its conversation was away before; stop "?": not answered."""

    __slots__ = ("ended", "from_s", "gap_s", "known", "nbytes", "start_s", "stop", "tip", "turn")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.tip: Key | None = None
        self.turn = 0
        self.gap_s: float | None = None
        self.nbytes = 0
        self.stop = "?"
        self.from_s = 0.0
        """Idle time at which the answer ended."""
        self.ended = False
        self.known: VisitClass | None = None
        """Its class as of now, once it is complete."""


class Visits:
    """All visits that may return, and the model that learns from them."""

    def __init__(self) -> None:
        self.model = ReturnModel()
        self.current = Visit(float("-inf"))
        self._tips: OrderedDict[Key, Visit] = OrderedDict()
        self._stops: set[str] = set()
        self._mean_nbytes = 0.0
        self._n_new = 0

    def use(self, key: Key, nbytes: int, now: float) -> None:
        """`key` is used by the visit of time `now`, which is a new one if it is a later time."""
        if now > self.current.start_s:
            self._close()
            self.current = Visit(now)
        visit = self.current
        visit.nbytes += nbytes
        back = self._tips.pop(key, None)
        if back is None or back is visit:
            return
        gap_s = now - back.start_s
        self._observe(back, gap_s, returned=True)
        if back.turn >= visit.turn:
            visit.turn, visit.gap_s = back.turn + 1, gap_s

    def set_tip(self, key: Key) -> None:
        """The current visit has used everything up to `key`."""
        self.current.tip = key

    def split(self, lower: Key, upper: Key, *, upper_is_more: bool) -> None:
        """See Policy.split. The next turn of a conversation often leaves the last input a few
        tokens before its end; what it goes on from is then the tip."""
        visit = self._tips.get(lower)
        if visit is not None and upper_is_more:
            del self._tips[lower]
            visit.tip = upper
            self._tips[upper] = visit

    def answered(self, key: Key, now: float, stop: str) -> None:
        """See Policy.answered."""
        visit = self._find(key)
        if visit is None or visit.stop != "?":
            return
        if stop not in self._stops and len(self._stops) < _STOPS_MAX:
            self._stops.add(stop)
        visit.stop = stop if stop in self._stops else ""
        visit.from_s = max(0.0, now - visit.start_s)
        visit.known = visit.known._replace(stop=visit.stop) if visit.known is not None else None

    def ended(self, key: Key) -> None:
        """See Policy.ended."""
        visit = self._find(key)
        if visit is not None:
            visit.ended = True

    def index(self, visit: Visit, now: float) -> float:
        """What a byte of this visit is worth: returns per second; -1 once it has ended."""
        if visit.ended:
            return -1.0
        return self.model.index(self._class(visit), now - visit.start_s)

    def _find(self, key: Key) -> Visit | None:
        return self.current if self.current.tip == key else self._tips.get(key)

    def _close(self) -> None:
        """The current visit is complete: wait for its return."""
        visit = self.current
        if visit.tip is None:
            return
        visit.known = self._class(visit)
        self._tips[visit.tip] = visit
        self._tips.move_to_end(visit.tip)
        self._mean_nbytes += _MEAN_WEIGHT * (visit.nbytes - self._mean_nbytes)
        if len(self._tips) > TIPS_MAX:
            _, lost = self._tips.popitem(last=False)
            self._observe(lost, visit.start_s - lost.start_s, returned=False)
        self._n_new += 1
        if self._n_new >= max(_LEARN_EVERY, len(self._tips) // _LEARN_SHARE):
            self._n_new = 0
            self.model.learn(self._away(visit.start_s))

    def _observe(self, visit: Visit, idle_s: float, *, returned: bool) -> None:
        for of, from_s in self._classes(visit):
            if from_s <= idle_s:
                self.model.observe(of, from_s, idle_s, returned=returned)

    def _away(self, now: float) -> Iterator[tuple[VisitClass, float, float]]:
        for visit in self._tips.values():
            for of, from_s in self._classes(visit):
                yield of, from_s, now - visit.start_s

    def _classes(self, visit: Visit) -> Iterator[tuple[VisitClass, float]]:
        """The classes a visit went through and the idle times at which it entered them."""
        yield self._class(visit)._replace(stop="?"), 0.0
        if visit.stop != "?":
            yield self._class(visit), visit.from_s

    def _class(self, visit: Visit) -> VisitClass:
        if visit.known is not None:
            return visit.known
        ratio = visit.nbytes / self._mean_nbytes if self._mean_nbytes else 1.0
        length = 1 + sum(ratio >= edge for edge in _LENGTHS)
        return VisitClass(visit.stop, gap_bucket(visit.gap_s), turn_bucket(visit.turn), length)
