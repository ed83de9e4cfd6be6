"""SpliceMeter: compares a module's moved rows with those that prefill computes at that place.

Modules are measured once, when they are precached, after texts of our own: once evaluated as a
whole and once spliced. The same measurement decides which tokens are evaluated again, and gives
the model's noise floor: the text after the module, over the same rows, in another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.calibration.measure import LogProbs, compare, log_softmax
from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS
from towerd.engine.embedded.calibration.scratch import BatchShape, SteppedSequence
from towerd.engine.embedded.restore.splice import complement
from towerd.errors import InvalidRequest
from towerd.kernels import dispatch
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import shift
from towerd.store.tree.module import Spans
from towerd.tiers.formats.calibration import DriftSample
from towerd.tokens import Ids

Deviation = npt.NDArray[np.float64]
"""float64[n]: by how much each token's rows are off, relative to their size; mean over planes."""

BLOCK_TOKENS = 16
"""Tokens are chosen in blocks: each run of them is a batch of its own."""
BEFORE_TOKENS = (48, 128, 320)
"""Lengths of the texts that modules are measured after."""
_BEFORE_TOKENS_MIN = 16


class GrowingSequence(Protocol):
    """See `SteppedSequence`; the laboratory has another that stays in the context."""

    @property
    def n(self) -> int: ...

    def decode(self, ids: Ids) -> object: ...

    def append(self, rows: KVRows) -> None: ...


@dataclass(frozen=True, slots=True)
class SpliceCase:
    """A module's surroundings: the prompt before it, and what follows it."""

    before: Ids
    after: Ids


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """One case after full prefill; its line is cut back to where the module begins."""

    line: SteppedSequence
    case: SpliceCase
    native: LogProbs


class SpliceMeter:
    """Measures one module: `prepare` it once, then ask for the `cost` of any choice of tokens."""

    def __init__(
        self,
        new_line: Callable[[], SteppedSequence],
        rope: Rope,
        *,
        rot_k: bool,
        head: Ids,
        ids: Ids,
        shapes: Sequence[BatchShape] = (),
    ) -> None:
        """head: the tokens it stands alone after (BOS, or none); ids: its own
        shapes: what the floor is measured in; without any it counts as 0"""
        self.head = head
        self.ids = ids
        self._new_line = new_line
        self._rope = rope
        self._rot_k = rot_k
        self._shapes = tuple(shapes)
        self._isolated: KVRows | None = None
        self._measured: list[_Measured] = []
        self._noise: list[DriftSample] = []
        self.deviation: Deviation = np.zeros(len(ids))

    def prepare(self, cases: Sequence[SpliceCase]) -> None:
        """Evaluate the module alone and in each case. Raises TowerdError."""
        line = self._new_line()
        if len(self.head):
            line.decode(self.head)
        line.decode(self.ids)
        self._isolated = line.rows(len(self.head), line.n)
        for case in cases:
            line = self._new_line()
            line.decode(case.before)
            line.decode(self.ids)
            p0, p1 = len(case.before), line.n
            self.deviation += deviation(line.rows(p0, p1), self.moved(p0)) / len(cases)
            native = log_softmax(line.logits(case.after))
            self._noise.append(self._disturbed(line, case, native))
            line.cut(p0)
            self._measured.append(_Measured(line, case, native))

    @property
    def floor(self) -> DriftSample:
        """The model's noise on the tokens that the cost is measured on."""
        return _mean(self._noise)

    def _disturbed(self, line: SteppedSequence, case: SpliceCase, native: LogProbs) -> DriftSample:
        """The change that another shape makes; the first case decides which shape is used."""
        found = {shape: compare(native, line.logits(case.after, shape)) for shape in self._shapes}
        if not found:
            return DriftSample(0.0, 1.0, 0.0)
        noisiest = max(found, key=lambda shape: found[shape].kl)
        self._shapes = (noisiest,)
        return found[noisiest]

    def moved(self, to: int) -> KVRows:
        """The module's rows with its first token at position `to`."""
        assert self._isolated is not None
        return shift(self._isolated, to, self._rope, rot_k=self._rot_k)

    def splice(self, line: GrowingSequence, spans: Spans) -> None:
        """Put the module at the end of `line`; the tokens of `spans` are evaluated."""
        at = line.n
        moved = self.moved(at)
        stays = complement(spans, len(self.ids))
        for p0, p1, is_kept in sorted(
            [(*run, True) for run in stays] + [(*run, False) for run in spans]
        ):
            if is_kept:
                line.append(moved.slice(at + p0, at + p1))
            else:
                line.decode(self.ids[p0:p1])

    def cost(self, spans: Spans) -> DriftSample:
        """The cost if the tokens of `spans` are evaluated and the others spliced in."""
        found = []
        for each in self._measured:
            self.splice(each.line, spans)
            found.append(compare(each.native, each.line.logits(each.case.after)))
            each.line.cut(len(each.case.before))
        return _mean(found)


def _mean(samples: Sequence[DriftSample]) -> DriftSample:
    """The mean over cases, which have equally many tokens."""
    kl, top1, nll = np.mean([(each.kl, each.top1, each.nll) for each in samples], axis=0).tolist()
    return DriftSample(kl, top1, nll)


def deviation(full: KVRows, moved: KVRows) -> Deviation:
    """By how much each token's rows differ, relative to the mean size of a plane's rows."""
    total = np.zeros(len(full))
    n_planes = 0
    for plane, a, b in zip(full.layout.planes, full.planes(), moved.planes(), strict=True):
        wide = [_floats(rows, plane.format.name, plane.n_elements) for rows in (a, b)]
        size = np.linalg.norm(wide[0], axis=1).mean()
        total += np.linalg.norm(wide[0] - wide[1], axis=1) / max(float(size), 1e-9)
        n_planes += 1
    return total / n_planes


def _floats(rows: npt.NDArray[np.uint8], name: str, n_elements: int) -> npt.NDArray[np.float32]:
    if name == "f32":
        return np.ascontiguousarray(rows).view(np.float32)
    return dispatch.transcoded(rows, name, "f32").view(np.float32)


def choose(found: Deviation, percent: float) -> Spans:
    """The blocks of tokens that deviate most, as many as make `percent` of all tokens."""
    n = len(found)
    wanted = round(n * percent / 100)
    starts = range(0, n, BLOCK_TOKENS)
    means = [float(found[at : at + BLOCK_TOKENS].mean()) for at in starts]
    taken = np.zeros(n + 1, np.bool_)
    for i in np.argsort(means, kind="stable")[::-1].tolist():
        at = i * BLOCK_TOKENS
        stop = min(n, at + BLOCK_TOKENS, at + wanted)
        taken[at:stop] = True
        wanted -= stop - at
        if wanted <= 0:
            break
    edges = np.flatnonzero(np.diff(np.concatenate([[False], taken]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def make_cases(text: Ids, head: Ids, n_module: int, n_ctx: int) -> list[SpliceCase]:
    """Surroundings for a module of `n_module` tokens from `text` (without special tokens), as
    long as a context of `n_ctx` has room for. Raises InvalidRequest if it has none."""
    room = n_ctx - n_module - NEXT_TOKENS - len(head)
    if room < _BEFORE_TOKENS_MIN:
        raise InvalidRequest(
            f"A module needs room for text around it: it has {n_module} tokens, and with a "
            f"context of {n_ctx} it may have {n_module + room - _BEFORE_TOKENS_MIN}."
        )
    cases = []
    at = 0
    for n in sorted({min(n, room) for n in BEFORE_TOKENS}):
        text = np.resize(text, max(len(text), at + n + NEXT_TOKENS))
        before, after = text[at : at + n], text[at + n : at + n + NEXT_TOKENS]
        cases.append(SpliceCase(np.concatenate([head, before]), after))
        at += n + NEXT_TOKENS
    return cases
