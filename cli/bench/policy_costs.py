"""What decisions cost, in CPU time: they wait for nothing.

An eviction is one call that frees what one request needs; that may take several victims, and
ranking what has changed since the last one, or everything. A score update is one key brought up
to date in such a pass, be it by seeing that its rank holds: visits that nobody has judged yet are
judged together there, so the time of the pass is shared by its keys. `score_anew_us` is the same
time shared by those alone whose rank did not hold. A forecast is one of a workflow's next steps.
`visit_ms` is what every request costs besides: the shadow cache, and the lessons of the
return-time model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np

from towerd.policy import make_policy
from towerd.policy.foresight import Foresight
from towerd.policy.predict.markov import Markov
from towerd.replay.simulate import replay
from towerd.replay.trace import Trace

_CAPACITY = 0.05


class _Timed:
    """A function, how long each call took, and how many things it was about."""

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

    def figures(self, name: str, per_s: float) -> dict[str, float]:
        """Mean and 99th percentile for one thing, in units of which a second has `per_s`."""
        each = [t / n for t, n in zip(self.times_s, self.n, strict=True) if n for _ in range(n)]
        return {
            f"{name}_mean": per_s * mean(each),
            f"{name}_p99": per_s * float(np.quantile(each, 0.99)),
        }


def of_decisions(chat: Trace) -> dict[str, float]:
    """Of foresight, in a replay of its own."""
    policy = make_policy("foresight")
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
    score = _Timed(policy._rank_leaves, lambda: ranked[-1])
    # In its place on this one object: policies carry no stopwatch for the sake of one benchmark.
    policy.victims = evict  # type: ignore[method-assign]
    policy._begin_visit = visit  # type: ignore[method-assign]
    policy._rank_leaves = score  # type: ignore[method-assign]
    policy._rank_each = count  # type: ignore[method-assign]
    replay(chat, policy, int(_CAPACITY * chat.n_distinct_blocks))
    figures = evict.figures("evict_ms", 1e3) | score.figures("score_update_us", 1e6)
    figures["score_anew_us_mean"] = 1e6 * sum(score.times_s) / sum(anew)
    return figures | visit.figures("visit_ms", 1e3)


def of_forecasts(paths: list[tuple[str, ...]]) -> dict[str, float]:
    """Of Markov-3, over `paths` of steps."""
    markov = Markov()
    predict = _Timed(markov.forecast)
    for path in paths:
        for n in range(1, len(path) + 1):
            markov.observe(path[:n])
            predict(path[:n])
    return predict.figures("predict_ms", 1e3) if paths else {}
