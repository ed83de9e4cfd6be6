"""What decisions cost: an eviction, the rank of a key, a forecast of a workflow's next steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, quantiles
from typing import Any

from towerd.policy import make_policy
from towerd.policy.predict.markov import Markov
from towerd.policy.tree import TreePolicy
from towerd.replay.simulate import replay
from towerd.replay.trace import Trace

_CAPACITY = 0.05


class _Timed:
    """A function, and how long each call took."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.times_s: list[float] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = self._call(*args, **options)
        self.times_s.append(time.perf_counter() - start)
        return found

    def figures(self, name: str, per_s: float) -> dict[str, float]:
        """Mean and 99th percentile in units of which a second has `per_s`."""
        times = self.times_s or [0.0, 0.0]
        return {
            f"{name}_mean": per_s * mean(times),
            f"{name}_p99": per_s * quantiles(times, n=100)[98],
        }


def costs(name: str, chat: Trace, paths: list[tuple[str, ...]]) -> dict[str, float]:
    """Of policy `name` in a replay of its own, and of Markov-3 over `paths` of steps."""
    policy = make_policy(name)
    assert isinstance(policy, TreePolicy)
    evict, rank = _Timed(policy.victims), _Timed(policy._rank)
    policy.victims = evict  # type: ignore[method-assign]
    policy._rank = rank  # type: ignore[method-assign]
    replay(chat, policy, int(_CAPACITY * chat.n_distinct_blocks))
    figures = evict.figures("evict_ms", 1e3) | rank.figures("score_update_us", 1e6)
    markov = Markov()
    predict = _Timed(markov.forecast)
    for path in paths:
        for n in range(1, len(path) + 1):
            markov.observe(path[:n])
            predict(path[:n])
    return figures | predict.figures("predict_ms", 1e3) if paths else figures
