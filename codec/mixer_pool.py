"""A pool of mixers. A new mixer checks its tables and builds its tree in some 20 ms, longer than it
takes to code a short session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from towerd.kernels._native import Mixer

Symbols = npt.NDArray[np.int32]
KEPT_MAX = 20
"""Mixers that the pool keeps. Each takes about a megabyte, and up to ten after a long session."""
_SLOTS_PER_SYMBOL = 40


class MixerPool:
    """Mixers of one table and state. Thread-safe."""

    def __init__(self, make: Callable[[], Mixer]) -> None:
        self._make = make
        self._free: list[Mixer] = []

    @contextmanager
    def borrow(self, n_symbols: int, context: Symbols, lanes: int = 1) -> Iterator[Mixer]:
        """A mixer that has only read `context`, with room for `n_symbols` in `lanes` texts."""
        try:
            mixer = self._free.pop()
        except IndexError:
            mixer = self._make()
        try:
            mixer.reset(lanes, table_bits(n_symbols + len(context)))
            mixer.learn(0, context)
            yield mixer
        finally:
            if len(self._free) < KEPT_MAX:
                self._free.append(mixer)


def table_bits(n_symbols: int) -> int:
    """Size of the mixer's hash table: a slot for each context of each decision."""
    return min(22, max(12, (n_symbols * _SLOTS_PER_SYMBOL).bit_length()))
