"""Selects the best predictor that is currently accurate enough, or none.

Every predictor of a list is asked at every step and scored by its recent accuracy: the share of
steps that it predicted. The first one is used while it is about as good as those after it and good
enough in absolute terms; a stale trained predictor gives way to Markov, and Markov to none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from towerd.policy.base import Learning
from towerd.policy.predict.base import Forecast, NoPrediction, Predictor, Share, best, whole

LIVE_MIN = 0.3
"""Live accuracy one step ahead below which a prediction is worthless."""
MARGIN = 0.02
"""How much worse than a later one a predictor may be before it is no longer used."""
_MEMORY = 0.99
_TRIAL_STEPS = 30.0
"""Weight, in steps, of the prior that a predictor's accuracy is `LIVE_MIN`."""
_OPEN_MAX = 1 << 14


class Fallback:
    """A Predictor that chooses among others, the preferred one first."""

    def __init__(self, predictors: Sequence[Predictor], share: Share = whole) -> None:
        self._predictors = list(predictors)
        self._share = share
        self._none = NoPrediction()
        self._right = [_TRIAL_STEPS * LIVE_MIN for _ in predictors]
        self._n = [_TRIAL_STEPS for _ in predictors]
        self._open: OrderedDict[tuple[str, ...], list[str | None]] = OrderedDict()
        """What each predictor forecast, for every path that may continue."""

    @property
    def live_accuracy(self) -> list[float]:
        """The recent accuracy of each predictor, one step ahead."""
        return [right / n for right, n in zip(self._right, self._n, strict=True)]

    def learned(self) -> Mapping[str, Any]:
        """See Learning.learned. By kind of predictor; live accuracy is not kept."""
        return {
            type(each).__name__: each.learned()
            for each in self._predictors
            if isinstance(each, Learning)
        }

    def recall(self, learned: Mapping[str, Any]) -> None:
        """See Learning.recall."""
        for each in self._predictors:
            if isinstance(each, Learning) and type(each).__name__ in learned:
                each.recall(learned[type(each).__name__])

    @property
    def leader(self) -> Predictor:
        """The predictor whose forecasts are used now."""
        live = self.live_accuracy
        for i, predictor in enumerate(self._predictors):
            if live[i] >= LIVE_MIN and live[i] >= max(live[i:]) - MARGIN:
                return predictor
        return self._none

    def forecast(self, path: Sequence[str]) -> Forecast:
        """See Predictor.forecast."""
        said: list[str | None] = []
        chosen: Forecast = ()
        leader = self.leader
        for predictor in self._predictors:
            found = predictor.forecast(path)
            said.append(best(found[0]) if found else None)
            if predictor is leader:
                chosen = found
        self._open[tuple(path)] = said
        while len(self._open) > max(1, self._share() * _OPEN_MAX):
            self._open.popitem(last=False)
        return chosen

    def observe(self, path: Sequence[str]) -> None:
        """See Predictor.observe."""
        said = self._open.get(tuple(path[:-1]))
        for i, name in enumerate(said or ()):
            self._right[i] = _MEMORY * self._right[i] + (name == path[-1])
            self._n[i] = _MEMORY * self._n[i] + 1.0
        for predictor in self._predictors:
            predictor.observe(path)
