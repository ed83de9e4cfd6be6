"""What stored rows cost: the same continuation evaluated over native rows and over stored ones.

A step restores a prefix into a scratch sequence, evaluates a few tokens after it and leaves the
sequence empty, so that between two steps nothing of a measurement is in the context. Who runs
the steps decides when: a benchmark at once, the daemon when it is idle.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from towerd.engine.base import Ids
from towerd.engine.embedded.context import Buffer, LlamaContext
from towerd.errors import TowerdError
from towerd.slots.blob import emit_blob, parse_blob
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows, join
from towerd.tiers.calibration import Cost, Table
from towerd.tiers.levels import stored_parts
from towerd.tiers.shrink import SINKS, TAIL

Logits = npt.NDArray[np.float32]
LogProbs = npt.NDArray[np.float32]

NEXT_TOKENS = 64
"""Tokens of one continuation: what a context of 64 sequences has output rows for anyway."""
PREFIX_TOKENS_MIN = SINKS + TAIL + 64
WINDOW_TOKENS_MAX = 2048
ROWS_BYTES_MAX = 256 << 20
"""Native rows that a measurement keeps in RAM."""
_CHUNK_TOKENS_MIN = 16

T = TypeVar("T")


class RunStep(Protocol):
    """Runs `work` where the context may be used, once `n_cells` cells are free."""

    def __call__(self, work: Callable[[], T], n_cells: int) -> T: ...


def run_now(work: Callable[[], T], n_cells: int) -> T:
    """RunStep for who owns the context alone."""
    return work()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The continuation `ids[p:p + NEXT_TOKENS]` of one window's prefix `ids[:p]`."""

    window: int
    p: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: windows of a text, and where in them."""

    windows: tuple[Ids, ...]
    checkpoints: tuple[Checkpoint, ...]

    @property
    def n_tokens(self) -> int:
        """Next-token distributions that each cost is the mean of."""
        return NEXT_TOKENS * len(self.checkpoints)

    @property
    def n_cells(self) -> int:
        """Cells that the largest step needs."""
        return max(c.p for c in self.checkpoints) + NEXT_TOKENS

    def digest(self) -> str:
        """Identifies the measured ids and places."""
        digest = hashlib.blake2b(digest_size=16)
        for window in self.windows:
            digest.update(len(window).to_bytes(8, "little") + window.astype("<i4").tobytes())
        for checkpoint in self.checkpoints:
            digest.update(f"{checkpoint.window}:{checkpoint.p};".encode())
        return digest.hexdigest()


def make_plan(
    ids: Ids, *, bos: int | None, window_tokens: int, token_bytes: int, n_checkpoints: int
) -> Plan:
    """Windows of `ids` (without special tokens; each window begins with `bos` if there is one)
    and `n_checkpoints` places spread evenly over them, fewer if the text has no more.

    Raises TowerdError when window or text are too short for any."""
    head = np.array([] if bos is None else [bos], np.int32)
    n = min(window_tokens, WINDOW_TOKENS_MAX, max(1, ROWS_BYTES_MAX // token_bytes))
    least = PREFIX_TOKENS_MIN + NEXT_TOKENS + 1
    if n < least or len(head) + len(ids) < least:
        raise TowerdError(
            f"Measuring takes a context and a text of at least {least} tokens; "
            f"here they have {n} and {len(head) + len(ids)}."
        )
    ids = ids[: max(1, ROWS_BYTES_MAX // token_bytes)]
    step = n - len(head)
    windows = [np.concatenate([head, ids[at : at + step]]) for at in range(0, len(ids), step)]
    windows = [window for window in windows if len(window) >= least]
    places = [Checkpoint(i, p) for i, window in enumerate(windows) for p in _places(len(window))]
    picked = np.linspace(0, len(places) - 1, min(n_checkpoints, len(places))).round().astype(int)
    return Plan(tuple(windows), tuple(places[i] for i in picked))


def _places(n: int) -> list[int]:
    """Ends of prefixes in a window of `n` tokens, with a known token after each continuation."""
    return sorted(range(n - NEXT_TOKENS - 1, PREFIX_TOKENS_MIN - 1, -NEXT_TOKENS))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Of some tokens: logits float32[n, n_vocab] and rows, each if asked for."""

    logits: Logits | None
    rows: KVRows | None


class Scratch:
    """One sequence of a context that holds nothing between two calls."""

    def __init__(self, context: LlamaContext, seq: int) -> None:
        self.context = context
        self.seq = seq

    def evaluate(
        self, prefix: Buffer | None, p: int, ids: Ids, *, logits: bool, rows: bool
    ) -> Evaluated:
        """Restore `prefix` (the blob of positions [0, p), None for none) and decode `ids` after
        it. Raises TowerdError; the sequence is empty afterwards in any case."""
        context = self.context
        try:
            if prefix is not None:
                context.set_state(self.seq, prefix)
            context.batch.clear()
            context.batch.add(ids, p, self.seq, logits_last=True)
            if logits:
                context.batch.logits[: len(ids)] = 1
            context.decode()
            found = np.stack([context.logits(i) for i in range(len(ids))]) if logits else None
            if not rows:
                return Evaluated(found, None)
            if p:
                context.seq_rm(self.seq, 0, p)
            return Evaluated(found, parse_blob(context.get_state(self.seq)).rows)
        finally:
            context.batch.clear()
            context.seq_rm(self.seq)


class Pace:
    """How many tokens a step may evaluate, so that it does not hold others up for long."""

    def __init__(self, step_s: float, n_max: int = NEXT_TOKENS) -> None:
        """step_s: how long a step may take; infinite: as long as it likes
        n_max: tokens that one step may evaluate"""
        self.step_s = step_s
        self.n_max = n_max
        self.n = n_max if math.isinf(step_s) else min(n_max, _CHUNK_TOKENS_MIN)

    def learn(self, n_tokens: int, seconds: float) -> None:
        """A step of `n_tokens` took so long."""
        if not math.isinf(self.step_s):
            n = int(self.step_s * n_tokens / max(seconds, 1e-9))
            self.n = min(self.n_max, max(_CHUNK_TOKENS_MIN, n))


class Measurer:
    """Measures tables on the checkpoints of a plan. Make it, `prepare`, then call it.

    `progress(n)` is called with the tokens of every continuation or part of a window that has
    been evaluated."""

    def __init__(
        self,
        scratch: Scratch,
        plan: Plan,
        *,
        run_step: RunStep = run_now,
        step_s: float = math.inf,
        progress: Callable[[int], Any] = lambda _: None,
    ) -> None:
        self.scratch = scratch
        self.plan = plan
        self._run_step = run_step
        self._pace = Pace(step_s, min(NEXT_TOKENS, len(scratch.context.batch.token)))
        self.progress = progress
        self._rows: dict[int, KVRows] = {}

    @property
    def layout(self) -> KVLayout:
        """Of the native rows; known once prepared."""
        return next(iter(self._rows.values())).layout

    def rows(self, checkpoint: Checkpoint) -> KVRows:
        """The native rows of a checkpoint's prefix."""
        return self._rows[checkpoint.window].slice(0, checkpoint.p)

    def prepare(self) -> None:
        """Evaluate the windows and keep their native rows. Raises TowerdError."""
        for window in sorted({c.window for c in self.plan.checkpoints}):
            ids = self.plan.windows[window]
            n = max(c.p for c in self.plan.checkpoints if c.window == window)
            parts: list[KVRows] = []
            while (p := parts[-1].p1 if parts else 0) < n:
                chunk = ids[p : min(n, p + self._pace.n)]
                started = time.monotonic()
                found = self._evaluate(parts, p, chunk, logits=False, rows=True)
                self._pace.learn(len(chunk), time.monotonic() - started)
                assert found.rows is not None
                parts.append(found.rows)
                self.progress(len(chunk))
            self._rows[window] = join(parts).copy()

    def __call__(self, tables: Sequence[Table]) -> list[Cost]:
        """The cost of each table; see `towerd.tiers.calibration.Measure`."""
        sums = [_Sums() for _ in tables]
        for checkpoint in self.plan.checkpoints:
            native = self.native(checkpoint)
            targets = self.targets(checkpoint)
            for table, total in zip(tables, sums, strict=True):
                parts = stored_parts(self.rows(checkpoint), table)
                total.add(native, self.logits(checkpoint, parts), targets)
        return [total.cost() for total in sums]

    def native(self, checkpoint: Checkpoint) -> LogProbs:
        """float32[NEXT_TOKENS, n_vocab] log-probabilities over native rows."""
        logits = self.logits(checkpoint, [self.rows(checkpoint)])
        for row in logits:
            row[:] = log_softmax(row)
        return logits

    def targets(self, checkpoint: Checkpoint) -> Ids:
        """The token that really follows each token of the continuation."""
        window = self.plan.windows[checkpoint.window]
        return window[checkpoint.p + 1 : checkpoint.p + NEXT_TOKENS + 1]

    def logits(self, checkpoint: Checkpoint, parts: Sequence[KVRows]) -> Logits:
        """float32[NEXT_TOKENS, n_vocab] of the continuation after these rows of the prefix."""
        rows = list(parts)
        ids = self.plan.windows[checkpoint.window]
        end = checkpoint.p + NEXT_TOKENS
        found = []
        for p in range(checkpoint.p, end, self._pace.n):
            stop = min(end, p + self._pace.n)
            piece = self._evaluate(rows, p, ids[p:stop], logits=True, rows=stop < end)
            assert piece.logits is not None
            found.append(piece.logits)
            if piece.rows is not None:
                rows.append(piece.rows)
        self.progress(NEXT_TOKENS)
        return np.concatenate(found)

    def _evaluate(
        self, parts: Sequence[KVRows], p: int, ids: Ids, *, logits: bool, rows: bool
    ) -> Evaluated:
        blob: Buffer | None = None
        if parts:
            v_trans = self.scratch.context.v_trans
            native = parts[-1].layout  # the last rows of a prefix are never stored ones
            blob = np.asarray(emit_blob(parts, layout=native, v_trans=v_trans))
        return self._run_step(
            lambda: self.scratch.evaluate(blob, p, ids, logits=logits, rows=rows), p + len(ids)
        )


class _Sums:
    """Running sums of one table's comparison with native rows."""

    def __init__(self) -> None:
        self.n = 0
        self.kl = self.same = self.nll = 0.0

    def add(self, native: LogProbs, logits: Logits, targets: Ids) -> None:
        for p, row, target in zip(native, logits, targets, strict=True):
            q = log_softmax(row)
            wide = p.astype(np.float64)
            self.kl += float(np.exp(wide) @ (wide - q))
            self.same += float(p.argmax() == q.argmax())
            self.nll -= float(q[target])
        self.n += len(targets)

    def cost(self) -> Cost:
        # Rounding can leave a sum of zeros a hair below zero.
        return Cost(max(0.0, self.kl / self.n), self.same / self.n, math.exp(self.nll / self.n))


def log_softmax(row: npt.NDArray[np.float32]) -> LogProbs:
    """float32[n_vocab] log-probabilities of one row of logits."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    out: LogProbs = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    return out
