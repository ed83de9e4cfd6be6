"""The budget of training, and its learning rate: warm-up, constant, decay to zero."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lab.train.errors import TrainError

WARMUP_STEPS, WARMUP_SHARE = 100, 0.1
"""The warm-up is the shorter of this many steps and this share of the budget."""
DECAY_SHARE = 0.4
"""The last part of the budget, in which the learning rate falls linearly to zero."""


@dataclass(frozen=True)
class Budget:
    """Either a number of steps, or minutes by the wall clock. Raises TrainError."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.steps, self.minutes) if x is not None]
        if len(given) != 1 or given[0] <= 0:
            raise TrainError("Give either a number of minutes or a number of steps, above 0.")

    def progress(self, step: int, elapsed_s: float) -> float:
        """The share of the budget that is used, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.minutes is not None
        return min(1.0, elapsed_s / (60 * self.minutes))


def scale(step: int, progress: float) -> float:
    """The factor of the learning rates at a step and a share of the budget."""
    warm = min(1.0, max((step + 1) / WARMUP_STEPS, progress / WARMUP_SHARE))
    return warm * min(1.0, (1 - progress) / DECAY_SHARE)


def in_decay(progress: float) -> bool:
    """Whether the learning rate has begun to fall: from then on more time does not help."""
    return progress > 1 - DECAY_SHARE


class Clock:
    """Seconds of training by the wall clock, those of earlier runs included."""

    def __init__(self, before_s: float) -> None:
        self._start_s = time.monotonic() - before_s

    def elapsed_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start_s
