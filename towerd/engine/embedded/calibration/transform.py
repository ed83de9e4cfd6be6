"""Learns a basis from the calibration text and measures which of its codings keep what
`near` and `small` promise.

The basis is learned from the first two thirds of the text; what its codings cost is measured on the rest, on
rows that were in the block formats of their levels before, as they are in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from towerd.codec.errors import CodecError
from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis
from towerd.codec.rows.learn import ROWS_PER_ELEMENT_MIN, Eigh, Rounding, groups_of
from towerd.engine.embedded.calibration.measure import Measurer
from towerd.engine.embedded.calibration.transform_basis import learned, windows_of
from towerd.errors import TowerdError
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.store.rows.recoding import encoded_run
from towerd.store.segments.coded_format import coded_format
from towerd.tiers.formats.calibration import (
    BOUNDS,
    LEVELS,
    Calibration,
    FormatCost,
    Table,
    bound_of,
    level_ranges,
    stored_parts,
)
from towerd.tiers.formats.format_search import CONTINUATIONS_MIN
from towerd.tiers.formats.transform import TransformCost
from towerd.tokens import Provenance

STEPS = (1.2, 0.85, 0.65, 0.5, 0.35, 0.27, 0.22, 0.18, 0.15)
"""Steps that are tried, the coarsest first: shares of the root mean variance of weighted numbers."""
LEARNED_SHARE = 2 / 3
LEARN_CONTINUATIONS = 40
WEIGHED_CONTINUATIONS = 6
"""Those that the weight of each group of planes is measured on."""
COARSE = 12
"""Continuations that every step is measured on."""
MEASURED_MAX = 48
SETTLED_MAX = 5
"""Tables of each fidelity that are expected to be measured on all of the text, at most."""
GROUP_ELEMENTS_MAX = 1024
"""A basis grows with the square of it."""
GROUP_LAYERS_MAX = 5
SAVING_MIN = 0.2
"""Share of the bytes of block formats that a coding must save."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A basis with the codings that were chosen, and those for each fidelity."""

    basis: Basis
    n_tokens: int
    choices: Mapping[str, TransformCost]


def group_layers(layout: KVLayout, n_rows: int) -> int:
    """Layers of a group, for so many rows to learn from. Raises TowerdError if they are too few for any."""
    n_elements = max(plane.n_elements for plane in layout.planes)
    most = min(max(GROUP_ELEMENTS_MAX, n_elements), n_rows // ROWS_PER_ELEMENT_MIN)
    found = min(GROUP_LAYERS_MAX, most // n_elements)
    if found < 1:
        raise TowerdError(
            f"A basis of {n_elements} elements takes {ROWS_PER_ELEMENT_MIN * n_elements} tokens; "
            f"there are {n_rows}."
        )
    return found


def expected_tokens(first: Measurer, second: Measurer, layout: KVLayout) -> int:
    """Tokens that `learn_transform` evaluates at most, unless more tables than SETTLED_MAX are measured. Raises
    TowerdError as it does."""
    windows = range(len(first.plan.windows))
    n_rows = sum(first.plan.prefix_of(window) for window in windows)
    n_groups = len(groups_of(layout, group_layers(layout, n_rows)))
    weighing = n_groups, min(WEIGHED_CONTINUATIONS, first.n_max)
    return first.n_coded_tokens([weighing]) + _expected_of_trial(second, len(BOUNDS))


def _expected_of_trial(measurer: Measurer, n_fidelities: int) -> int:
    coarse = len(STEPS), min(COARSE, measurer.n_max)
    settled = 1, min(MEASURED_MAX, measurer.n_max)
    return measurer.n_coded_tokens(n_fidelities * [coarse, *SETTLED_MAX * [settled]])


def learn_transform(
    first: Measurer,
    second: Measurer,
    rope: Rope,
    found: Calibration,
    row_identity: bytes,
    *,
    rot_k: bool = False,
    eigh: Eigh = np.linalg.eigh,
    pause: Callable[[], object] = lambda: None,
    expect: Callable[[int], object] = lambda _: None,
) -> Learned:
    """Learn on the windows of `first`, measure on those of `second`; `found` says which block formats rows are
    in before. rot_k, eigh, pause: see `learn`; expect: told how many tokens are evaluated from then on, at most. Raises TowerdError if the rows cannot be transform-coded."""
    for continuation in first.plan.continuations:
        first.rows(continuation)
    n_rows = sum(map(len, windows_of(first)))
    steps = {f"s{step:g}": Rounding(step) for step in STEPS}
    try:
        basis = learned(
            first,
            rope,
            steps,
            group_layers(first.layout, n_rows),
            min(WEIGHED_CONTINUATIONS, first.n_max),
            row_identity,
            eigh,
            pause,
            rot_k,
        )
    except (CodecError, StateError) as error:
        raise TowerdError(f"Rows are not transform-coded: {error}") from error
    trial = _Trial(second, basis, found, pause, expect)
    return trial.chosen(n_rows)


class _Trial:
    """Measures codings of one basis."""

    def __init__(
        self,
        measurer: Measurer,
        basis: Basis,
        found: Calibration,
        pause: Callable[[], object],
        expect: Callable[[int], object],
    ) -> None:
        self._measurer = measurer
        self._basis = basis
        self._found = found
        self._pause = pause
        self._expect = expect
        self._names = list(basis.codings)

    def chosen(self, n_rows: int) -> Learned:
        tables = {}
        for i, fidelity in enumerate(BOUNDS):
            self._expect(_expected_of_trial(self._measurer, len(BOUNDS) - i))
            tables[fidelity] = self._table(fidelity)
        names = {name for table, _ in tables.values() for name in table}
        basis = only(self._basis, names) if names else self._basis
        choices = {}
        for fidelity, (table, cost) in tables.items():
            block = self._found.choices[fidelity]
            bits = self._bits(table) if table else 0.0
            if not table or bits > (1 - SAVING_MIN) * self._found.bits[block.levels[-1]]:
                continue
            levels = tuple(coded_format(name, basis.digest) for name in table)
            bound = bound_of(fidelity, self._found.floor.kl)
            choices[fidelity] = TransformCost(levels, cost, bits, bound)
        return Learned(basis, n_rows, choices)

    def _table(self, fidelity: str) -> tuple[Table, FormatCost]:
        """The coarsest codings within the bound, coarser for what many share where that is within it, too; none
        if no step is, or if the text is too short to tell: rows then stay in their block formats."""
        if self._measurer.n_max < CONTINUATIONS_MIN:
            return (), FormatCost(0, 0, 0, 0, 0, 0)
        bound = bound_of(fidelity, self._found.floor.kl)
        blocks = self._found.choices[fidelity].levels
        uniform = [(name,) * LEVELS for name in STEP_NAMES if name in self._names]
        coarse = self._costs(uniform, blocks, min(COARSE, self._measurer.n_max))
        for i, (table, guess) in enumerate(zip(uniform, coarse, strict=True)):
            if guess.excess > bound:
                continue
            cost = self._settled(table, blocks)
            if not cost.is_within(bound):
                continue
            for j in range(max(0, i - 2), i):  # the coarsest first
                shared = uniform[j][: LEVELS - 1] + table[LEVELS - 1 :]
                of_shared = self._settled(shared, blocks)
                if of_shared.is_within(bound):
                    return shared, of_shared
            return table, cost
        return (), FormatCost(0, 0, 0, 0, 0, 0)

    def _settled(self, table: Table, blocks: Table) -> FormatCost:
        return self._costs([table], blocks, min(MEASURED_MAX, self._measurer.n_max))[0]

    def _costs(self, tables: Sequence[Table], blocks: Table, n: int) -> list[FormatCost]:
        makers = [partial(self._parts, table=table, blocks=blocks) for table in tables]
        return self._measurer.costs_of(makers, n)

    def _parts(self, rows: KVRows, table: Table, blocks: Table) -> list[KVRows]:
        """Native rows as they come back from the store, each level in its coding and out of its block format
        before."""
        before = stored_parts(rows, blocks)
        found, at = [], 0
        for name, (start, stop) in zip(table, level_ranges(len(rows)), strict=True):
            if start >= stop:
                continue
            if at < start:
                found.append(rows.slice(at, start))
            inside = [
                part.slice(start, stop) for part in before if part.p0 < stop and start < part.p1
            ]
            found += self._decoded(inside, name)
            at = stop
        if at < len(rows):
            found.append(rows.slice(at, len(rows)))
        return found

    def _decoded(self, parts: Sequence[KVRows], name: str) -> list[KVRows]:
        basis = self._basis
        run = encoded_run(parts, NATIVE, Provenance.EXACT, basis, name, self._pause)
        assert basis.rope is not None
        read = []
        for piece in run.pieces:
            self._pause()
            found = coded.parse(piece.data)
            read.append(found.read(found.p0, found.p1, basis, basis.rope))
        return read

    def _bits(self, table: Table) -> float:
        """Mean bits of a value of a private chat, which is in the last level's coding."""
        n_bytes = n_values = 0
        per_row = sum(plane.n_elements for plane in self._basis.layout.planes)
        for window in windows_of(self._measurer):
            run = encoded_run(
                [window], NATIVE, Provenance.EXACT, self._basis, table[-1], self._pause
            )
            n_bytes += sum(len(piece.data) for piece in run.pieces)
            n_values += len(window) * per_row
        return 8 * n_bytes / n_values


STEP_NAMES = tuple(f"s{step:g}" for step in STEPS)


def only(basis: Basis, names: set[str]) -> Basis:
    """The basis with these codings alone, and the components that they keep."""
    codings = {name: basis.codings[name] for name in sorted(names)}
    groups = []
    for i, group in enumerate(basis.groups):
        n = max(len(coding.classes[i]) for coding in codings.values())
        groups.append(replace(group, vectors=np.ascontiguousarray(group.vectors[:n])))
    return replace(basis, groups=tuple(groups), codings=codings)
