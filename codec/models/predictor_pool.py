"""A pool of predictors for several users at a time, so that thawing a session does not wait for
another session that is being frozen in idle time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from towerd.codec.models.base import CopyablePredictor, TokenPredictor


class PredictorPool:
    """Gives each user a predictor. If the model cannot be copied, users take turns. Thread-safe."""

    def __init__(self, first: TokenPredictor, kept_max: int) -> None:
        """`kept_max`: copies that are kept for later users; each has lanes of its own."""
        self.first, self.kept_max = first, kept_max
        self._free: list[TokenPredictor] = [first]
        self._turn = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[TokenPredictor]:
        """A predictor that has read nothing."""
        if isinstance(self.first, CopyablePredictor):
            try:
                predictor = self._free.pop()
            except IndexError:
                predictor = self.first.copy()
            try:
                predictor.reset()
                yield predictor
            finally:
                if predictor is self.first or len(self._free) < self.kept_max:
                    self._free.append(predictor)
        else:
            with self._turn:
                self.first.reset()
                yield self.first
