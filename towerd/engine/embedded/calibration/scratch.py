"""Scratch: a sequence in which measurements are evaluated, in small steps and chosen batches.

A `SteppedSequence` keeps its rows in RAM and is in the context during a step alone, so that between
two of them the context is free for others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.sequences import Buffer
from towerd.slots.blob import emit_blob, parse_rows
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows, join
from towerd.tokens import Ids

Logits = npt.NDArray[np.float32]

BATCH_TOKENS = 32
"""Tokens of a batch where next-token distributions are compared. llama.cpp's kernels, and with
them its rounding, differ between one token, a few, and 64."""
_CHUNK_TOKENS_MIN = 16

T = TypeVar("T")


class RunStep(Protocol):
    """Runs `work` where the context may be used, once `n_cells` cells are free."""

    def __call__(self, work: Callable[[], T], n_cells: int) -> T: ...


def run_now(work: Callable[[], T], n_cells: int) -> T:
    """The RunStep of a caller that alone uses the context."""
    return work()


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The width of the batches that evaluate a continuation, and their number of threads."""

    name: str
    width: int
    """Tokens of a batch."""
    threads: int | None = None
    """None: as many as the context has."""


def other_shapes(context: LlamaContext) -> tuple[BatchShape, ...]:
    """What the floor compares with batches of BATCH_TOKENS: the shapes in which llama.cpp takes
    other kernels or splits its sums otherwise. One token at a time is how replies are generated.
    """
    n = context.n_threads
    threads = n // 2 if n > 1 else 2
    found = [
        BatchShape("one token at a time", 1),
        BatchShape(f"batches of {NEXT_TOKENS}", NEXT_TOKENS),
        BatchShape(f"one token at a time on {threads} thread{'s' * (threads > 1)}", 1, threads),
    ]
    return tuple(shape for shape in found if shape.width <= len(context.batch.token))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation: logits float32[n, n_vocab] and rows, each if asked for."""

    logits: Logits | None
    rows: KVRows | None
    decode_s: float
    """What decoding took of it; the rest is for the rows before, in and out of the context."""


class Scratch:
    """One sequence of a context that holds nothing between two calls."""

    def __init__(
        self,
        context: LlamaContext,
        seq: int,
        *,
        cell_ext: bool = False,
        window: int = 0,
        evaluated: Callable[[int], object] = lambda _: None,
    ) -> None:
        """cell_ext: see `towerd.slots.blob.parse_rows`; window: positions that sliding-window layers
        see; 0: there are none; evaluated: called with the number of tokens of every evaluation"""
        self.context = context
        self.seq = seq
        self.evaluated = evaluated
        self.rows_max = window or len(context.batch.token)
        """Tokens of an evaluation whose rows can be had: llama.cpp gives none that its last token
        does not see."""
        self._how = cell_ext, window > 0

    def evaluate(
        self,
        prefix: Buffer | None,
        p: int,
        ids: Ids,
        *,
        logits: bool,
        rows: bool,
        shape: BatchShape | None = None,
    ) -> Evaluated:
        """Restore `prefix` (the blob of positions [0, p), None for none) and decode `ids` after
        it, in one batch or in the batches of `shape`. Rows can be had of `rows_max` tokens. Raises
        TowerdError; the sequence is empty afterwards in any case."""
        context = self.context
        width = len(ids) if shape is None else shape.width
        try:
            if prefix is not None:
                context.set_state(self.seq, prefix)
            found = []
            began = time.monotonic()
            with context.threads(None if shape is None else shape.threads):
                for at in range(0, len(ids), width):
                    found += self._batch(ids[at : at + width], p + at, logits)
            decode_s = time.monotonic() - began
            self.evaluated(len(ids))
            out = np.stack(found) if logits else None
            if not rows:
                return Evaluated(out, None, decode_s)
            if p:
                context.seq_rm(self.seq, 0, p)
            cell_ext, has_window = self._how
            blob = context.get_state(self.seq)
            found_rows = parse_rows(blob, cell_ext=cell_ext, has_window=has_window)
            return Evaluated(out, found_rows.token_major(), decode_s)
        finally:
            context.batch.clear()
            context.seq_rm(self.seq)

    def _batch(self, ids: Ids, p: int, logits: bool) -> list[Logits]:
        """Decode `ids` in one batch; a copy of each token's logits if asked for."""
        context = self.context
        context.batch.clear()
        context.batch.add(ids, p, self.seq, logits_last=True)
        if logits:
            context.batch.logits[: len(ids)] = 1
        context.decode()
        return [context.logits(i).copy() for i in range(len(ids))] if logits else []


class Pace:
    """The number of tokens that a step may evaluate without delaying other work for long."""

    def __init__(
        self, step_s: float, n_max: int = NEXT_TOKENS, unit: int = _CHUNK_TOKENS_MIN
    ) -> None:
        """step_s: how long a step may take; may be infinite
        n_max: tokens that one step may evaluate
        unit: a step has a multiple of this many tokens, or `n_max`"""
        self.step_s = step_s
        self.n_max = n_max
        self.unit = min(unit, n_max)
        self.n = n_max if math.isinf(step_s) else self.unit

    def learn(self, n_tokens: int, seconds: float, overhead_s: float = 0.0) -> None:
        """Adapt to a step of `n_tokens` that took `seconds`, of which `overhead_s` whatever their
        number. Where that is most of a step, one takes twice as long: else hardly anything of it
        would be decoding."""
        if not math.isinf(self.step_s):
            usable_s = max(self.step_s - overhead_s, overhead_s)
            n = int(usable_s * n_tokens / max(seconds - overhead_s, 1e-9))
            self.n = min(self.n_max, max(self.unit, n // self.unit * self.unit))


class SteppedSequence:
    """A sequence that grows at its end, evaluated step by step. Methods raise TowerdError."""

    def __init__(
        self, scratch: Scratch, *, run_step: RunStep = run_now, step_s: float = math.inf
    ) -> None:
        """run_step: decides when a step runs: at once, or when the daemon is idle; step_s: how long
        one may take"""
        self.parts: list[KVRows] = []
        """Its rows."""
        self._native: KVLayout | None = None
        """The layout of rows that it evaluated."""
        self._scratch = scratch
        self._run_step = run_step
        self._step_s = step_s
        self._n_batch = min(scratch.rows_max, len(scratch.context.batch.token))
        self._pace = Pace(step_s, self._n_batch)
        self._paces: dict[BatchShape, Pace] = {}

    @property
    def n(self) -> int:
        """Tokens in it."""
        return self.parts[-1].p1 if self.parts else 0

    def decode(self, ids: Ids) -> None:
        """Evaluate `ids`."""
        for _ in self.steps(ids):
            pass

    def steps(self, ids: Ids) -> Iterable[int]:
        """Evaluate `ids`; yields how many tokens each step had."""
        while len(ids):
            step, ids = ids[: self._pace.n], ids[self._pace.n :]
            rows = self._evaluate(self.parts, step, self._pace, rows=True).rows
            assert rows is not None
            self.parts.append(rows.copy())
            yield len(step)

    def logits(self, ids: Ids, shape: BatchShape | None = None) -> Logits:
        """float32[n, n_vocab] of `ids` after it, in batches of BATCH_TOKENS unless `shape` says
        otherwise; it has the same tokens afterwards."""
        shape = shape or BatchShape("", min(BATCH_TOKENS, self._n_batch))
        # Logits of many tokens at once would take more memory than everything else.
        n_max = min(NEXT_TOKENS, self._n_batch)
        pace = self._paces.setdefault(shape, Pace(self._step_s, n_max, shape.width))
        parts, found = list(self.parts), []
        while len(ids):
            step, ids = ids[: pace.n], ids[pace.n :]
            done = self._evaluate(parts, step, pace, shape, logits=True, rows=len(ids) > 0)
            assert done.logits is not None
            found.append(done.logits)
            parts += [done.rows] if done.rows is not None else []
        return np.concatenate(found)

    def append(self, rows: KVRows) -> None:
        """Add rows, the first at position `n`."""
        self.parts.append(rows)

    def rows(self, p0: int, p1: int) -> KVRows:
        """The rows of positions [p0, p1)."""
        inside = [part for part in self.parts if part.p0 < p1 and p0 < part.p1]
        return join([part.slice(p0, p1) for part in inside])

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens."""
        self.parts = [part.slice(0, n) for part in self.parts if part.p0 < n]

    def _evaluate(
        self,
        parts: Sequence[KVRows],
        ids: Ids,
        pace: Pace,
        shape: BatchShape | None = None,
        *,
        logits: bool = False,
        rows: bool,
    ) -> Evaluated:
        """One step: `ids` after the rows of `parts`."""
        p, blob = parts[-1].p1 if parts else 0, None
        if parts:
            v_trans, native = self._scratch.context.v_trans, self._native or parts[-1].layout
            blob = np.asarray(emit_blob(parts, layout=native, v_trans=v_trans))

        def work() -> Evaluated:
            started = time.monotonic()
            done = self._scratch.evaluate(blob, p, ids, logits=logits, rows=rows, shape=shape)
            took_s = time.monotonic() - started
            pace.learn(len(ids), took_s, took_s - done.decode_s)
            return done

        done = self._run_step(work, p + len(ids))
        self._native = self._native if done.rows is None else done.rows.layout
        return done
