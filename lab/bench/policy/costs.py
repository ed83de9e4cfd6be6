"""The cost of decisions, in CPU time.

An eviction is one call that frees what one request needs. It may take several victims, and may rank
the keys that changed since the last call, or all of them. A score update is one key brought up to
date in such a pass, even if its rank turns out to be unchanged: the pass scores all pending visits
together, so its time is shared by its keys. `score_anew_us` is the same time shared only by the
keys whose rank changed. A forecast is one of a workflow's next steps. `visit_ms` is what every
request costs besides: the shadow cache, and training the return-time model. `answer_ms` is the cost
of the end of an answer, after its text has been sent: now and then all leaves are ranked there.

A replay always makes the same decisions, so each counts with its shortest time of several replays,
which excludes other load on the machine. Python's cycle collector runs as in the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from lab.replay.simulate import replay
from lab.replay.trace import Trace
from towerd.app.loop import tune_gc
from towerd.policy import make_policy
from towerd.policy.foresight import Foresight
from towerd.policy.predict.markov import Markov

_CAPACITY = 0.05
_REPLAYS = 3


class _Timed:
    """A function, the time of each call, and how many items each call handled."""

    def __init__(self, call: Callable[..., Any], about: Callable[[], int] = lambda: 1) -> None:
        self._call, self._about = call, about
        self.times_s: list[float] = []
        self.n: list[int] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.process_time()
        found = self._call(*args, **options)
        self.times_s.append(time.process_time() - start)
        self.n.append(self._about())
        return found

    def take_least(self, others: Sequence[_Timed]) -> None:
        """Take the shortest time of each call over this one and others that made the same calls."""
        times = (self.times_s, *(other.times_s for other in others))
        self.times_s = [min(each) for each in zip(*times, strict=True)]

    def figures(self, name: str, per_s: float) -> dict[str, float]:
        """Mean and 99th percentile per item, in units of 1 / `per_s` seconds."""
        each = [t / n for t, n in zip(self.times_s, self.n, strict=True) if n for _ in range(n)]
        return {
            f"{name}_mean": per_s * mean(each),
            f"{name}_p99": per_s * float(np.quantile(each, 0.99)),
        }


@dataclass(slots=True)
class _Times:
    """The times of one replay; n_anew: number of ranks that changed."""

    evict: _Timed
    visit: _Timed
    answer: _Timed
    score: _Timed
    n_anew: int


def of_decisions(chat: Trace) -> dict[str, float]:
    """Costs of the decisions of foresight, in replays of its own."""
    first, *others = (_replayed(chat) for _ in range(_REPLAYS))
    first.evict.take_least([each.evict for each in others])
    first.visit.take_least([each.visit for each in others])
    first.answer.take_least([each.answer for each in others])
    first.score.take_least([each.score for each in others])
    return {
        **first.evict.figures("evict_ms", 1e3),
        **first.score.figures("score_update_us", 1e6),
        "score_anew_us_mean": 1e6 * sum(first.score.times_s) / first.n_anew,
        **first.visit.figures("visit_ms", 1e3),
        **first.answer.figures("answer_ms", 1e3),
    }


def _replayed(chat: Trace) -> _Times:
    policy = make_policy("foresight", chat)
    assert isinstance(policy, Foresight)
    ranked: list[int] = []
    anew: list[int] = []
    rank_each = policy._rank_each

    def count(entries: list[Any]) -> list[Any]:
        found = rank_each(entries)
        ranked.append(len(entries))
        anew.append(len(found))
        return found

    evict, visit = _Timed(policy.victims), _Timed(policy._begin_visit)
    answer = _Timed(policy.answered)
    score = _Timed(policy._rank_leaves, lambda: ranked[-1])
    # Patched on this one object, so that policies carry no timers for the sake of a benchmark.
    policy.victims = evict  # type: ignore[method-assign]
    policy._begin_visit = visit  # type: ignore[method-assign]
    policy.answered = answer  # type: ignore[method-assign]
    policy._rank_leaves = score  # type: ignore[method-assign]
    policy._rank_each = count  # type: ignore[method-assign]
    tune_gc()
    replay(chat, policy, int(_CAPACITY * chat.n_distinct_blocks))
    return _Times(evict, visit, answer, score, sum(anew))


def of_forecasts(paths: list[tuple[str, ...]]) -> dict[str, float]:
    """Costs of forecasts by Markov-3, over `paths` of steps."""
    markov = Markov()
    predict = _Timed(markov.forecast)
    for path in paths:
        for n in range(1, len(path) + 1):
            markov.observe(path[:n])
            predict(path[:n])
    return predict.figures("predict_ms", 1e3) if paths else {}
