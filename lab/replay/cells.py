"""Many cells of a comparison in several processes; cells are independent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from lab.replay.compare import Cell, compare
from lab.replay.interleave import interleave
from lab.replay.load import load
from lab.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where a trace comes from: a path and, for traces of single sessions, the number of users who
    take them one after the other, and the seed of the order. users 0: the trace as it is."""

    path: Path
    segment_tokens: int
    users: int = 0
    seed: int = 0

    def trace(self) -> Trace:
        """Read the trace, cached per process. Raises TraceError."""
        return _interleaved(self)


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """One cell: a trace at one capacity, a share of its distinct blocks."""

    source: TraceSource
    capacity: float
    policies: tuple[str, ...]
    end_hints: bool = False

    def cell(self) -> Cell:
        """Replay the trace. Raises TraceError, ConfigError."""
        trace = self.source.trace()
        return next(compare(trace, self.policies, (self.capacity,), end_hints=self.end_hints))


class Workers(Protocol):
    """Runs tasks."""

    def __call__(self, tasks: Sequence[ReplayTask]) -> Iterator[Cell]:
        """The cells of the tasks, in the same order."""
        ...


@contextmanager
def workers(n: int) -> Iterator[Workers]:
    """`n` processes that run tasks in parallel; 1: this process runs them."""
    if n == 1:
        yield lambda tasks: map(ReplayTask.cell, tasks)
        return
    with ProcessPoolExecutor(n, get_context("spawn")) as pool:
        try:
            yield lambda tasks: pool.map(ReplayTask.cell, tasks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@lru_cache(maxsize=2)
def _read(path: Path, segment_tokens: int) -> Trace:
    return load(path, segment_tokens)


@lru_cache(maxsize=3)
def _interleaved(source: TraceSource) -> Trace:
    trace = _read(source.path, source.segment_tokens)
    return interleave(trace, source.users, source.seed) if source.users else trace
