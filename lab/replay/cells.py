"""Many cells of a comparison, in several processes: no cell knows of another one."""

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
class Source:
    """Where a trace comes from: a path, and for sessions how many users take one after the
    other, in which order. users 0: the trace as it is."""

    path: Path
    segment_tokens: int
    users: int = 0
    seed: int = 0

    def trace(self) -> Trace:
        """Read it, unless this process has it already. Raises TraceError."""
        return _woven(self)


@dataclass(frozen=True, slots=True)
class Task:
    """One cell: a trace at one capacity, a share of its distinct blocks."""

    source: Source
    capacity: float
    policies: tuple[str, ...]
    end_hints: bool = False

    def cell(self) -> Cell:
        """Replay it. Raises TraceError, ConfigError."""
        trace = self.source.trace()
        return next(compare(trace, self.policies, (self.capacity,), end_hints=self.end_hints))


class Workers(Protocol):
    """Something that works tasks off."""

    def __call__(self, tasks: Sequence[Task]) -> Iterator[Cell]:
        """Their cells, in their order."""
        ...


@contextmanager
def workers(n: int) -> Iterator[Workers]:
    """`n` processes that work tasks off side by side; 1: this one does."""
    if n == 1:
        yield lambda tasks: map(Task.cell, tasks)
        return
    with ProcessPoolExecutor(n, get_context("spawn")) as pool:
        try:
            yield lambda tasks: pool.map(Task.cell, tasks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@lru_cache(maxsize=2)
def _read(path: Path, segment_tokens: int) -> Trace:
    return load(path, segment_tokens)


@lru_cache(maxsize=3)
def _woven(source: Source) -> Trace:
    trace = _read(source.path, source.segment_tokens)
    return interleave(trace, source.users, source.seed) if source.users else trace
