"""What it takes to bring rows back, beside evaluating their tokens.

Both are done in turns, a batch of tokens and the same rows, so that what else runs on the machine slows both. The
rows are those of a window of text, again and again: what decoding takes depends on their coding alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from towerd.engine.embedded.context.context import LlamaContext
from towerd.slots.rows import KVRows
from towerd.tokens import Ids

Reader = Callable[[int, int], Any]
"""Makes the blob that goes into the context of the stored rows of positions [p0, p1)."""


@dataclass(slots=True)
class ResumeTimes:
    """Seconds for the first `n_tokens`: to evaluate them, to read their rows by each reader, and to put rows into
    the context, which is the same for all."""

    n_tokens: int
    prefill_s: float
    append_s: float
    read_s: dict[str, float] = field(default_factory=dict)

    def ratio(self, reader: str) -> float:
        """Evaluating over reading and putting into the context."""
        return self.prefill_s / (self.read_s[reader] + self.append_s)


def repeated(rows: KVRows, n: int) -> KVRows:
    """The rows again and again, as those of positions [0, n)."""
    which = np.arange(n) % len(rows)
    positions = np.arange(n, dtype=np.int32)
    k, v = (tuple(plane[which] for plane in planes) for planes in (rows.k, rows.v))
    ext = None
    if rows.ext is not None:
        ext = np.stack([positions, positions, rows.ext[which, 2]], axis=1)
    return KVRows(rows.layout, positions, k, v, ext)


def resume_times(
    context: LlamaContext, ids: Ids, readers: Mapping[str, Reader], marks: tuple[int, ...]
) -> list[ResumeTimes]:
    """Measured at each of `marks`, ascending, in a context that is empty before and afterwards. ids: tokens to
    evaluate, again and again"""
    n_batch, at, prefill_s = len(context.batch.token), 0, 0.0
    read_s, found = dict.fromkeys(readers, 0.0), []
    for reader in readers.values():
        reader(0, min(n_batch, marks[0]))  # what is made when rows are read for the first time
    try:
        for mark in marks:
            while at < mark:
                end = min(at + n_batch, mark)
                prefill_s += seconds(partial(_evaluate, context, ids, at, end))
                for name, reader in readers.items():
                    read_s[name] += seconds(partial(reader, at, end))
                at = end
            found.append(ResumeTimes(mark, prefill_s, _append_s(context), dict(read_s)))
    finally:
        context.batch.clear()
        context.seq_rm(0)
    return found


def _evaluate(context: LlamaContext, ids: Ids, at: int, end: int) -> None:
    context.batch.clear()
    context.batch.add(ids[np.arange(at, end) % len(ids)], at, 0, logits_last=True)
    context.decode()


def _append_s(context: LlamaContext) -> float:
    """To put all that the context holds into it."""
    state = context.get_state(0).copy()
    context.seq_rm(0)
    return seconds(lambda: context.set_state(0, state))


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
