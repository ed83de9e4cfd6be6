"""Predictors for several users at a time, so that nobody who waits for a session to thaw waits for
another one that is being frozen in idle time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from towerd.codec.models.base import CopyablePredictor, Predictor


class Predictors:
    """A model for each user at a time, where it can be copied; else they take turns. Thread-safe."""

    def __init__(self, first: Predictor) -> None:
        self.first = first
        self._free: list[Predictor] = [first]
        self._turn = threading.Lock()

    @contextmanager
    def lent(self) -> Iterator[Predictor]:
        """One that has read nothing."""
        if isinstance(self.first, CopyablePredictor):
            try:
                predictor = self._free.pop()
            except IndexError:
                predictor = self.first.copy()
            try:
                predictor.reset()
                yield predictor
            finally:
                self._free.append(predictor)
        else:
            with self._turn:
                self.first.reset()
                yield self.first
