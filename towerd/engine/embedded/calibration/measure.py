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

import msgspec
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
from towerd.tiers.formats.format_search import Call
from towerd.tiers.shrink import DEFAULT_ENDS, NativeEnds
from towerd.tokens import Ids

LogProbs = npt.NDArray[np.float32]

_PROBES = 2
"""Continuations on which the shape of the floor is chosen."""
_NOISE = "noise"


class Measured(msgspec.Struct):
    """What was measured so far, each list on the first continuations of a plan: enough to continue
    where a measurement was interrupted."""

    probed: dict[str, float] = {}
    """Shape -> mean KL divergence on the first few."""
    noise: list[DriftSample] = []
    """In the shape that disturbs most."""
    tables: dict[str, list[DriftSample]] = {}
    """Formats of a table, joined by commas, and native ends unless they are the default -> its samples;
    those of native rows for their text."""


class Measurer:
    """Measures tables on the continuations of a plan; see
    `towerd.tiers.formats.format_search.Meter`.

    A window of the text is evaluated when a continuation in it is measured for the first time."""

    def __init__(
        self,
        scratch: Scratch,
        plan: MeasurePlan,
        *,
        run_step: RunStep = run_now,
        step_s: float = math.inf,
        measured: Measured | None = None,
        keep: Callable[[Measured], object] = lambda _: None,
    ) -> None:
        """measured: what is known of the plan already, which is continued; keep: called with what is
        known whenever there is more of it"""
        self.scratch = scratch
        self.plan = plan
        self._line = SteppedSequence(scratch, run_step=run_step, step_s=step_s)
        self._rows: dict[int, KVRows] = {}
        self._measured = measured or Measured()
        self._keep = keep

    @property
    def n_max(self) -> int:
        return len(self.plan.continuations)

    @property
    def layout(self) -> KVLayout:
        """Of the native rows."""
        return self.rows(self.plan.continuations[0]).layout

    def rows(self, continuation: Continuation) -> KVRows:
        """The native rows of a continuation's prefix. Raises TowerdError."""
        window = continuation.window
        if window not in self._rows:
            n = self.plan.prefix_of(window)
            self._line.parts = []
            self._line.decode(self.plan.windows[window][:n])
            self._rows[window] = self._line.rows(0, n).copy()
        return self._rows[window].slice(0, continuation.p)

    def n_tokens(self, calls: Sequence[Call]) -> int:
        """Tokens that `costs` would evaluate in these calls, one after the other."""
        found, windows, measured = 0, set(), self._measured
        if not measured.probed:
            found += NEXT_TOKENS * _PROBES * (1 + len(other_shapes(self.scratch.context)))
            windows |= {each.window for each in self.plan.continuations[:_PROBES]}
        counts = {name: len(samples) for name, samples in measured.tables.items()}
        counts |= {_NOISE: len(measured.noise), _name(ALL_NATIVE): self.n_max}
        for tables, n in calls:
            names = {_NOISE, *map(_name, tables)}
            for i, continuation in enumerate(self.plan.continuations[:n]):
                n_missing = sum(counts.get(name, 0) <= i for name in names)
                if n_missing:
                    found += NEXT_TOKENS * (1 + n_missing)
                    windows.add(continuation.window)
            counts |= {name: max(n, counts.get(name, 0)) for name in names}
        return found + sum(self.plan.prefix_of(each) for each in windows - self._rows.keys())

    def n_coded_tokens(self, calls: Sequence[tuple[int, int]]) -> int:
        """Tokens that `costs_of` would evaluate in calls of so many codings on so many continuations each, with the
        rows of all windows."""
        places, n_most = self.plan.continuations, max((n for _, n in calls), default=0)
        begun = {each.window for each in places[: max(n_most, _PROBES)]} | self._rows.keys()
        others = {each.window for each in places} - begun
        found = self.n_tokens([([ALL_NATIVE], n_most)])
        found += sum(self.plan.prefix_of(each) for each in others)
        return found + NEXT_TOKENS * sum(n * (1 + n_codings) for n_codings, n in calls)

    @property
    def _noisiest(self) -> BatchShape:
        """The shape that disturbs most."""
        name = max(self._measured.probed, key=lambda each: self._measured.probed[each])
        return next(each for each in other_shapes(self.scratch.context) if each.name == name)

    def floor(self, n: int) -> Floor:
        """The model's noise on the first `n` continuations, in the shape that disturbs most."""
        self._measure([], n)
        noise = self._measured.noise[:n]
        kl, ci = interval([sample.kl for sample in noise])
        top1 = float(np.mean([sample.top1 for sample in noise]))
        probed = dict(self._measured.probed)
        return Floor(kl, ci, top1, self._noisiest.name, probed, NEXT_TOKENS * n)

    def costs(
        self, tables: Sequence[Table], n: int, ends: NativeEnds = DEFAULT_ENDS
    ) -> list[FormatCost]:
        """The cost of each table with these native ends on the first `n` continuations."""
        self._measure(tables, n, ends)
        found, noise = self._measured.tables, self._measured.noise[:n]
        samples = [(table, found[_name(table, ends)][:n]) for table in tables]
        return [
            format_cost(each, [] if table == ALL_NATIVE else noise, NEXT_TOKENS)
            for table, each in samples
        ]

    def costs_of(
        self, codings: Sequence[Callable[[KVRows], Sequence[KVRows]]], n: int
    ) -> list[FormatCost]:
        """The cost of what each of `codings` makes of native rows, as consecutive parts, on the first `n`
        continuations. On each they are called in their order."""
        self._measure([], n)
        samples: list[list[DriftSample]] = [[] for _ in codings]
        for continuation in self.plan.continuations[:n]:
            native, targets = self.native(continuation), self.targets(continuation)
            for coding, found in zip(codings, samples, strict=True):
                logits = self.logits(continuation, coding(self.rows(continuation)))
                found.append(compare(native, logits, targets))
        return [format_cost(found, self._measured.noise[:n], NEXT_TOKENS) for found in samples]

    def _measure(self, tables: Sequence[Table], n: int, ends: NativeEnds = DEFAULT_ENDS) -> None:
        """Make sure that there are samples of `tables` and the floor on the first `n`
        continuations."""
        measured = self._measured
        if not measured.probed:
            self._probe()
        of_native = measured.tables.setdefault(_name(ALL_NATIVE), [])
        samples = {each: measured.tables.setdefault(_name(each, ends), []) for each in tables}
        for i, continuation in enumerate(self.plan.continuations[:n]):
            missing = [table for table, found in samples.items() if len(found) == i]
            missing = [table for table in missing if table != ALL_NATIVE]
            if not missing and len(measured.noise) > i:
                continue
            native, targets = self.native(continuation), self.targets(continuation)
            if len(measured.noise) == i:
                sample = self._disturbed(continuation, native, self._noisiest)
                nll = -float(native[np.arange(len(targets)), targets].mean())
                of_native.append(DriftSample(0.0, 1.0, nll))
                measured.noise.append(sample)
                self._keep(measured)
            for table in missing:
                parts = stored_parts(self.rows(continuation), table, ends)
                logits = self.logits(continuation, parts)
                samples[table].append(compare(native, logits, targets))
                self._keep(measured)

    def _probe(self) -> None:
        """Measure how much each other shape disturbs, on a few continuations."""
        continuations = self.plan.continuations[:_PROBES]
        shapes = other_shapes(self.scratch.context)
        kl = dict.fromkeys([shape.name for shape in shapes], 0.0)
        for continuation in continuations:
            native = self.native(continuation)
            for shape in shapes:
                disturbed = self._disturbed(continuation, native, shape)
                kl[shape.name] += disturbed.kl / len(continuations)
        self._measured.probed = kl
        self._keep(self._measured)

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
        return self._line.logits(ids[p : p + NEXT_TOKENS], shape)


def _name(table: Table, ends: NativeEnds = DEFAULT_ENDS) -> str:
    name = ",".join(table)
    has_default = ends == DEFAULT_ENDS or table == ALL_NATIVE
    return name if has_default else f"{name};{ends.sinks},{ends.tail}"


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
