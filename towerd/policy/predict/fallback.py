"""Selects the best predictor that is currently accurate enough, or none.

Every predictor of a list is asked at every step and judged by what then happens: the share of
steps that it named, of late. The first one leads while it is as good as those behind it and good
enough at all; a trained one that has gone stale makes room for Markov, and Markov for none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from towerd.policy.base import Learning
from towerd.policy.predict.base import Forecast, NoPrediction, Predictor, best

LIVE_MIN = 0.3
"""Live accuracy one step ahead below which a prediction is worth nothing."""
MARGIN = 0.02
"""How much worse than one behind it a predictor may be before it loses the lead."""
_MEMORY = 0.99
_TRIAL_STEPS = 30.0
"""Steps for which a predictor is believed to be as good as `LIVE_MIN` before any evidence."""
_OPEN_MAX = 1 << 14


class Fallback:
    """A Predictor made of others, the preferred one first."""

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        self._predictors = list(predictors)
        self._none = NoPrediction()
        self._right = [_TRIAL_STEPS * LIVE_MIN for _ in predictors]
        self._n = [_TRIAL_STEPS for _ in predictors]
        self._open: OrderedDict[tuple[str, ...], list[str | None]] = OrderedDict()
        """What each predictor said, for every path that may continue."""

    @property
    def live_accuracy(self) -> list[float]:
        """Of each predictor, one step ahead."""
        return [right / n for right, n in zip(self._right, self._n, strict=True)]

    def learned(self) -> Mapping[str, Any]:
        """See Learning.learned: of each kind of predictor; how right they were is judged anew."""
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
        """Whose forecasts count now."""
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
        if len(self._open) > _OPEN_MAX:
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
