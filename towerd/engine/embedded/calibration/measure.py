"""Measurer: evaluates the same continuation over native and over stored rows, and compares.

A step restores a prefix into a scratch sequence, evaluates a few tokens after it and leaves the
sequence empty, so that between two steps nothing of a measurement is in the context. The caller
decides when a step runs: a benchmark at once, the daemon when it is idle.

Reference and trial are evaluated in the same shape, batches of BATCH_TOKENS. The model's noise
floor is what another shape changes over the same native rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS, Continuation, MeasurePlan
from towerd.engine.embedded.calibration.scratch import (
    BatchShape,
    Logits,
    RunStep,
    Scratch,
    SteppedSequence,
    other_shapes,
    run_now,
)
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import (
    ALL_NATIVE,
    DriftSample,
    Floor,
    FormatCost,
    Table,
    format_cost,
    interval,
    stored_parts,
)
from towerd.tokens import Ids

LogProbs = npt.NDArray[np.float32]

_PROBES = 2
"""Continuations on which the shape of the floor is chosen."""


class Measurer:
    """Measures tables on the continuations of a plan; see
    `towerd.tiers.formats.format_search.Meter`. Call `prepare` first.

    `progress(n)` is called with the tokens of every continuation or part of a window that has
    been evaluated."""

    def __init__(
        self,
        scratch: Scratch,
        plan: MeasurePlan,
        *,
        run_step: RunStep = run_now,
        step_s: float = math.inf,
        progress: Callable[[int], Any] = lambda _: None,
    ) -> None:
        self.scratch = scratch
        self.plan = plan
        self.progress = progress
        self._line = SteppedSequence(scratch, run_step=run_step, step_s=step_s)
        self._rows: dict[int, KVRows] = {}
        self._samples: dict[Table, list[DriftSample]] = {ALL_NATIVE: []}
        self._noise: list[DriftSample] = []
        self._probed: dict[BatchShape, float] = {}

    @property
    def n_max(self) -> int:
        return len(self.plan.continuations)

    @property
    def layout(self) -> KVLayout:
        """Of the native rows; known once prepared."""
        return next(iter(self._rows.values())).layout

    def rows(self, continuation: Continuation) -> KVRows:
        """The native rows of a continuation's prefix."""
        return self._rows[continuation.window].slice(0, continuation.p)

    def prepare(self) -> None:
        """Evaluate the windows and keep their native rows. Raises TowerdError."""
        for window in sorted({c.window for c in self.plan.continuations}):
            n = max(c.p for c in self.plan.continuations if c.window == window)
            self._line.parts = []
            for n_done in self._line.steps(self.plan.windows[window][:n]):
                self.progress(n_done)
            self._rows[window] = self._line.rows(0, n).copy()

    @property
    def _noisiest(self) -> BatchShape:
        """The shape that disturbs most."""
        return max(self._probed, key=lambda shape: self._probed[shape])

    def floor(self, n: int) -> Floor:
        """The model's noise on the first `n` continuations, in the shape that disturbs most."""
        self._measure([], n)
        noise = self._noise[:n]
        kl, ci = interval([sample.kl for sample in noise])
        top1 = float(np.mean([sample.top1 for sample in noise]))
        probed = {shape.name: each for shape, each in self._probed.items()}
        return Floor(kl, ci, top1, self._noisiest.name, probed, NEXT_TOKENS * n)

    def costs(self, tables: Sequence[Table], n: int) -> list[FormatCost]:
        """The cost of each table on the first `n` continuations."""
        self._measure(tables, n)
        return [
            format_cost(
                self._samples[table][:n],
                [] if table == ALL_NATIVE else self._noise[:n],
                NEXT_TOKENS,
            )
            for table in tables
        ]

    def costs_of(
        self, codings: Sequence[Callable[[KVRows], Sequence[KVRows]]], n: int
    ) -> list[FormatCost]:
        """The cost of what each of `codings` makes of native rows, as consecutive parts, on the first `n`
        continuations."""
        self._measure([], n)
        samples: list[list[DriftSample]] = [[] for _ in codings]
        for continuation in self.plan.continuations[:n]:
            native, targets = self.native(continuation), self.targets(continuation)
            for coding, found in zip(codings, samples, strict=True):
                logits = self.logits(continuation, coding(self.rows(continuation)))
                found.append(compare(native, logits, targets))
        return [format_cost(found, self._noise[:n], NEXT_TOKENS) for found in samples]

    def _measure(self, tables: Sequence[Table], n: int) -> None:
        """Make sure that there are samples of `tables` and the floor on the first `n`
        continuations."""
        if not self._probed:
            self._probe()
        samples = {table: self._samples.setdefault(table, []) for table in tables}
        for i, continuation in enumerate(self.plan.continuations[:n]):
            missing = [table for table, found in samples.items() if len(found) == i]
            if not missing and len(self._noise) > i:
                continue
            native, targets = self.native(continuation), self.targets(continuation)
            if len(self._noise) == i:
                nll = -float(native[np.arange(len(targets)), targets].mean())
                self._samples[ALL_NATIVE].append(DriftSample(0.0, 1.0, nll))
                self._noise.append(self._disturbed(continuation, native, self._noisiest))
            for table in missing:
                if table != ALL_NATIVE:
                    parts = stored_parts(self.rows(continuation), table)
                    logits = self.logits(continuation, parts)
                    samples[table].append(compare(native, logits, targets))

    def _probe(self) -> None:
        """Measure how much each other shape disturbs, on a few continuations."""
        continuations = self.plan.continuations[:_PROBES]
        shapes = other_shapes(self.scratch.context)
        kl = dict.fromkeys(shapes, 0.0)
        for continuation in continuations:
            native = self.native(continuation)
            for shape in shapes:
                kl[shape] += self._disturbed(continuation, native, shape).kl / len(continuations)
        self._probed = kl

    def _disturbed(
        self, continuation: Continuation, native: LogProbs, shape: BatchShape
    ) -> DriftSample:
        """The same continuation over the same native rows in another shape."""
        logits = self.logits(continuation, [self.rows(continuation)], shape)
        return compare(native, logits, self.targets(continuation))

    def native(self, continuation: Continuation) -> LogProbs:
        """float32[NEXT_TOKENS, n_vocab] log-probabilities over native rows."""
        return log_softmax(self.logits(continuation, [self.rows(continuation)]))

    def targets(self, continuation: Continuation) -> Ids:
        """The token that follows each token of the continuation in the text."""
        window = self.plan.windows[continuation.window]
        return window[continuation.p + 1 : continuation.p + NEXT_TOKENS + 1]

    def logits(
        self, continuation: Continuation, parts: Sequence[KVRows], shape: BatchShape | None = None
    ) -> Logits:
        """float32[NEXT_TOKENS, n_vocab] of the continuation after these rows of the prefix."""
        self._line.parts = list(parts)
        ids, p = self.plan.windows[continuation.window], continuation.p
        found = self._line.logits(ids[p : p + NEXT_TOKENS], shape)
        self.progress(NEXT_TOKENS)
        return found


def compare(native: LogProbs, logits: Logits, targets: Ids | None = None) -> DriftSample:
    """How the distributions of `logits` differ from those of `native`. targets: the tokens that
    follow in the text, for the perplexity"""
    kl = same = nll = 0.0
    for i, (p, row) in enumerate(zip(native, logits, strict=True)):
        q = log_softmax(row)
        wide = p.astype(np.float64)
        kl += float(np.exp(wide) @ (wide - q))
        same += float(p.argmax() == q.argmax())
        nll -= 0.0 if targets is None else float(q[targets[i]])
    n = len(native)
    # Rounding can leave a sum of zeros a hair below zero.
    return DriftSample(max(0.0, kl / n), same / n, nll / n)


def log_softmax(logits: npt.NDArray[np.float32]) -> LogProbs:
    """float32 log-probabilities of one row of logits, or of several, in a new array."""
    out = np.empty_like(logits)
    for row, to in zip(np.atleast_2d(logits), np.atleast_2d(out), strict=True):
        wide = row.astype(np.float64)
        wide -= wide.max()
        to[:] = wide - np.log(np.exp(wide).sum())
    return out
