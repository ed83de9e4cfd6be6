"""Measures what rows cost an answer that are kept behind other text, against how much they deviate.

Runs of a text are evaluated behind one text, and their rows kept behind another, as requests keep them:
blocks of each run are evaluated again in between. What follows is compared with its exact evaluation. The
model's own answers instead of the text gave the same slope (1.27 and 1.36 on SmolLM2) in twice the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from towerd.engine.embedded.calibration.measure import LogProbs, compare, log_softmax
from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS
from towerd.engine.embedded.calibration.scratch import BatchShape, SteppedSequence
from towerd.errors import TowerdError
from towerd.slots.rows import KVRows
from towerd.tiers.moved_limits import (
    BLOCK_TOKENS,
    MovedLimits,
    RunProfile,
    block_offsets,
    deviation,
    spread,
)
from towerd.tokens import Ids

TEXTS = 4
"""Runs that are measured, each behind several changed texts."""
RUN_TOKENS, NEW_TOKENS = 384, 64
_ANSWERS = 0.4
"""What keeping a run costs an answer, at most, where it costs the continuation of a text 1. Over 29
changes of agents' prompts an answer of SmolLM2 took a sixteenth."""
_SLOPE_MIN = 0.03
"""A fifth of what SmolLM2 has."""
_TOKENS_MIN = 96
"""A run this short, behind half as many tokens, is the least that says something."""


@dataclass(frozen=True, slots=True)
class Change:
    """A run of tokens, and the text before it that changes."""

    before: Ids
    instead: Ids
    run: Ids
    new: Ids
    """What follows the run, and is new: a turn of the user's."""
    after: Ids
    """What follows that: the tokens at which distributions are compared."""


@dataclass(frozen=True, slots=True)
class MovedSample:
    """What keeping one run did."""

    run: RunProfile
    kl: float
    """Mean KL divergence of the next-token distributions after it from exact evaluation, in nats."""
    floor_kl: float
    """The model's noise on the same tokens."""

    @property
    def excess(self) -> float:
        """What was added to the noise; negative by chance only."""
        return self.kl - self.floor_kl


def plan_changes(text: Ids, head: Ids, n_ctx: int) -> list[list[Change]]:
    """The changes to measure, those of one run together, out of `text` (ids without special tokens);
    head: what every prompt begins with. Raises TowerdError if the context or the text is too short."""
    n_after = NEW_TOKENS + NEXT_TOKENS
    n_run = min(RUN_TOKENS, (n_ctx - len(head) - n_after) * 2 // 3, len(text) // 6)
    n_before = n_run // 2
    if n_run < _TOKENS_MIN:
        raise TowerdError("The context or the text is too short to measure moved rows.")
    step = (len(text) - n_run - n_after - 2 * n_before) // TEXTS
    found = []
    for at in range(0, TEXTS * step, step):
        ends = np.cumsum([n_before, n_run, NEW_TOKENS, NEXT_TOKENS])
        before, run, new, after, _ = np.split(text[at:], ends)
        other = np.roll(text, -(at + len(text) // 2))[:n_before]
        changes = [
            np.concatenate([head, instead]) for instead in _changed(before, other, run, n_before)
        ]
        first = np.concatenate([head, before])
        found.append([Change(first, each, run, new, after) for each in changes])
    return found


def _changed(before: Ids, other: Ids, run: Ids, n: int) -> Iterator[Ids]:
    """Texts of at most `n` tokens in place of `before`: a few tokens are others, a span of another
    length, the second half, everything, and words of the run itself; and one half is gone."""
    few = before.copy()
    few[n // 2 : n // 2 + 6] = other[:6]
    yield few
    yield np.concatenate([before[: n // 3], other[: n // 4], before[2 * n // 3 :]])
    yield np.concatenate([before[: n // 2], other[: n // 2]])
    yield other
    pieces = np.array_split(run, max(2, len(run) // 12))
    yield np.concatenate([*pieces[1::2], *pieces[::2]])[:n]
    yield before[n // 2 :]


class MovedMeter:
    """Measures changes with sequences that `new_line` makes."""

    def __init__(
        self,
        new_line: Callable[[], SteppedSequence],
        moved: Callable[[KVRows, int], KVRows],
        shapes: Sequence[BatchShape],
    ) -> None:
        """moved: see `Rotation.moved`; shapes: what the noise is measured in, the first that disturbs
        most is kept"""
        self._new_line = new_line
        self._moved = moved
        self._shapes = tuple(shapes)

    def n_tokens(self, changes: Sequence[Change]) -> int:
        """Tokens that `measure` would evaluate now."""
        run, after = len(changes[0].run), len(changes[0].after)
        ends = [*block_offsets(run), run]
        blocks = sum(min(BLOCK_TOKENS, b - a) for a, b in itertools.pairwise(ends))
        n_probes = (len(self._shapes) - 1) * after
        return (
            len(changes[0].before)
            + run
            + n_probes
            + sum(
                len(each.instead) + run + 2 * len(each.new) + 3 * after + blocks for each in changes
            )
        )

    def measure(self, changes: Sequence[Change]) -> list[MovedSample]:
        """The samples of changes before one run."""
        one = changes[0]
        line = self._new_line()
        line.decode(one.before)
        line.decode(one.run)
        rows = line.rows(len(one.before), line.n)
        return [self._sample(rows, each) for each in changes]

    def _sample(self, rows: KVRows, change: Change) -> MovedSample:
        line = self._new_line()
        line.decode(change.instead)
        line.decode(change.run)
        line.decode(change.new)
        native = log_softmax(line.logits(change.after))
        floor_kl = self._noise(line, change.after, native)
        line.cut(len(change.instead))
        deviations = self._keep(line, rows, change.run)
        line.decode(change.new)
        kl = compare(native, line.logits(change.after)).kl
        run = RunProfile(len(change.run), deviations)
        return MovedSample(run, kl, floor_kl)

    def _noise(self, line: SteppedSequence, ids: Ids, native: LogProbs) -> float:
        found = {shape: compare(native, line.logits(ids, shape)).kl for shape in self._shapes}
        noisiest = max(found, key=lambda shape: found[shape])
        self._shapes = (noisiest,)
        return found[noisiest]

    def _keep(self, line: SteppedSequence, rows: KVRows, run: Ids) -> list[float]:
        """Keep the run at the end of `line`; the deviation of each block that is evaluated again."""
        at, found = line.n, []
        kept = self._moved(rows, at)
        offsets = block_offsets(len(run))
        for block, end in zip(offsets, [*offsets[1:], len(run)], strict=True):
            stop = block + BLOCK_TOKENS
            line.decode(run[block:stop])
            evaluated = line.rows(at + block, at + stop)
            found.append(deviation(evaluated, kept.slice(at + block, at + stop)))
            line.append(kept.slice(at + stop, at + end))
        return found


def limits_of(samples: Sequence[MovedSample], row_identity: str) -> MovedLimits:
    """The limits that follow from what was measured: the excess rises in proportion to the spread of
    the deviations; least squares over the samples tell how steeply, and _ANSWERS how much less an answer
    takes. The least deviation of any block is what every change causes, however small: rounding,
    amplified. A slope that the noise hides is taken to be _SLOPE_MIN: at 0 all would be kept."""
    noise = min(min(each.run.deviations) for each in samples)
    x = np.array([spread(each.run, noise) for each in samples])
    y = np.array([each.excess for each in samples])
    slope = max(_SLOPE_MIN, _ANSWERS * float(x @ y / max(x @ x, 1e-12)))
    floor_kl = float(np.mean([each.floor_kl for each in samples]))
    return MovedLimits(row_identity, floor_kl, noise, slope)
