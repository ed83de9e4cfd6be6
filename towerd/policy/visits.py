"""Visits: who used what last, and whether and when they came back.

A visit is one request as a policy sees it: the keys used at one moment, of which the last is its
tip. It returns when a later visit uses its tip; the later one goes on with its turn number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from towerd.policy.base import Key
from towerd.policy.predict.returns import ReturnModel, VisitClass, bucket

TIPS_MAX = 20_000
"""Visits that are waited for; beyond that the oldest counts as lost."""
_LEARN_EVERY = 128
_LEARN_SHARE = 8
"""The model learns again after this share of what is waited for is new: O(1) per visit."""
_STOPS_MAX = 8
"""Stop reasons told apart; clients may send any text."""
_FIRST = "first"
_MEAN_WEIGHT = 0.01
_GAP_EDGES_S = (1.0, 3.0, 10.0, 30.0, 90.0)
_NEW_EDGES = (0.02, 0.06, 0.17, 0.5, 1.2)
_LENGTH_EDGES = (0.4, 1.2)
"""Of new and of all bytes: shares of the mean length of a visit."""
_SERVICE_EDGES_S = (2.0, 4.0, 8.0, 16.0, 40.0)


class Visit:
    """One request. before: the stop reason of the visit that it goes on from; gap_s: how long
    its conversation was away; base_nbytes: what it shares with that visit."""

    __slots__ = (
        "answered_s", "asked", "base_nbytes", "before", "ended", "ended_from", "gap_s", "is_back",
        "known", "nbytes", "start_s", "stop", "tip", "turn",
    )  # fmt: skip

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.tip: Key | None = None
        self.turn = 0
        self.before = _FIRST
        self.gap_s: float | None = None
        self.nbytes = 0
        self.base_nbytes = 0
        self.stop = ""
        self.answered_s: float | None = None
        self.ended = False
        self.ended_from: Key | None = None
        """An inner key: what is above it goes on."""
        self.is_back = False
        self.asked: VisitClass | None = None
        """Its class until it is answered, once it is complete."""
        self.known: VisitClass | None = None
        """Its class from then on."""


class Visits:
    """All visits that may return, and the model that learns from them."""

    def __init__(self) -> None:
        self.model = ReturnModel()
        self.current = Visit(float("-inf"))
        self.tips: OrderedDict[Key, Visit] = OrderedDict()
        """Those that have not returned yet."""
        self._stops: set[str] = set()
        self._mean_nbytes = 0.0
        self._n_new = 0

    def begin(self, now: float) -> Visit:
        """What is used from now on is used by a new visit, if `now` is a later time."""
        if now > self.current.start_s:
            self._close()
            self.current = Visit(now)
        return self.current

    def returned(self, key: Key, now: float) -> None:
        """The current visit uses `key`: if that is the tip of an earlier one, it is back."""
        back, visit = self.tips.get(key), self.current
        if back is None or back is visit:
            return
        del self.tips[key]
        back.is_back = True
        self._observe(back, now, returned=True)
        if back.turn >= visit.turn:
            since_s = back.start_s if back.answered_s is None else back.answered_s
            visit.turn, visit.gap_s = back.turn + 1, max(0.0, now - since_s)
            visit.before, visit.base_nbytes = back.stop, back.nbytes

    def set_tip(self, key: Key) -> None:
        """The current visit has used everything up to `key`."""
        self.current.tip = key

    def split(self, lower: Key, upper: Key, *, upper_is_more: bool) -> None:
        """See Policy.split. The next turn of a conversation often leaves the last input a few
        tokens before its end; what it goes on from is then the tip."""
        visit = self.tips.get(lower)
        if visit is not None and upper_is_more:
            del self.tips[lower]
            visit.tip = upper
            self.tips[upper] = visit

    def answered(self, key: Key, now: float, stop: str) -> None:
        """See Policy.answered."""
        visit = self._find(key)
        if visit is None or visit.answered_s is not None:
            return
        if stop not in self._stops and len(self._stops) < _STOPS_MAX:
            self._stops.add(stop)
        visit.stop = stop if stop in self._stops else ""
        visit.answered_s = max(now, visit.start_s)
        if visit.asked is not None:
            visit.known = self._class_known(visit)

    def ended(self, key: Key) -> None:
        """See Policy.ended."""
        visit = self._find(key)
        if visit is not None:
            visit.ended = True

    def index(self, visit: Visit, now: float) -> float:
        """What a byte of this visit is worth, as if it had not ended: returns per second."""
        if visit.answered_s is None:
            return self.model.index(visit.asked or self._class_asked(visit), now - visit.start_s)
        return self.model.index(visit.known or self._class_known(visit), now - visit.answered_s)

    def _find(self, key: Key) -> Visit | None:
        return self.current if self.current.tip == key else self.tips.get(key)

    def _close(self) -> None:
        """The current visit is complete: wait for its return."""
        visit = self.current
        if visit.tip is None:
            return
        visit.asked = self._class_asked(visit)
        if visit.answered_s is not None:
            visit.known = self._class_known(visit)
        self.tips[visit.tip] = visit
        self.tips.move_to_end(visit.tip)
        self._mean_nbytes += _MEAN_WEIGHT * (visit.nbytes - self._mean_nbytes)
        if len(self.tips) > TIPS_MAX:
            _, lost = self.tips.popitem(last=False)
            self._observe(lost, visit.start_s, returned=False)
        self._n_new += 1
        if self._n_new >= max(_LEARN_EVERY, len(self.tips) // _LEARN_SHARE):
            self._n_new = 0
            self.model.learn(self._away(visit.start_s))

    def _observe(self, visit: Visit, now: float, *, returned: bool) -> None:
        for of, since_s in _stages(visit):
            self.model.observe(of, now - since_s, returned=returned)

    def _away(self, now: float) -> Iterator[tuple[VisitClass, float]]:
        for visit in self.tips.values():
            for of, since_s in _stages(visit):
                yield of, now - since_s

    def _class_asked(self, visit: Visit) -> VisitClass:
        length = bucket(self._share(visit.nbytes), _LENGTH_EDGES)
        return VisitClass("?" + visit.before, *self._buckets(visit), length)

    def _class_known(self, visit: Visit) -> VisitClass:
        service_s = (visit.answered_s or visit.start_s) - visit.start_s
        service = bucket(service_s, _SERVICE_EDGES_S)
        return VisitClass(visit.stop, *self._buckets(visit), service)

    def _buckets(self, visit: Visit) -> tuple[int, int]:
        new = self._share(visit.nbytes - visit.base_nbytes)
        return bucket(visit.gap_s, _GAP_EDGES_S), bucket(new, _NEW_EDGES)

    def _share(self, nbytes: int) -> float:
        return nbytes / self._mean_nbytes if self._mean_nbytes else 1.0


def _stages(visit: Visit) -> Iterator[tuple[VisitClass, float]]:
    """The classes of a complete visit and the times from which its idle time counts in them."""
    assert visit.asked is not None
    yield visit.asked, visit.start_s
    if visit.known is not None and visit.answered_s is not None:
        yield visit.known, visit.answered_s
