"""Learning transform codings: what is chosen was measured, and keeps its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import numpy as np
import pytest
from calibrations import calibration_of
from transformed import IDENTITY, LAYOUT, ROPE, coded_rows_of

from towerd.codec.rows.basis import read_basis
from towerd.engine.embedded.calibration import transform as learning
from towerd.engine.embedded.calibration.measure import Measurer
from towerd.engine.embedded.calibration.measure_plan import Continuation
from towerd.errors import TowerdError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows
from towerd.store.segments.coded_format import coding_of
from towerd.tiers.formats.calibration import BOUNDS, LEVELS, FormatCost

N = 900
NATS_OF_ERROR = 0.05
"""What a mean square error of 1 costs here."""


@dataclass
class Plan:
    continuations: tuple[Continuation, ...] = tuple(
        Continuation(window, p) for p in (N, N - 64) for window in (0, 1)
    )
    windows: tuple[int, ...] = (0, 1)

    def prefix_of(self, window: int) -> int:
        return N


@dataclass
class FakeMeasurer:
    """Measures errors instead of a model: cost is in proportion to the mean square error."""

    seeds: tuple[int, int]
    plan: Plan = field(default_factory=Plan)
    layout: KVLayout = LAYOUT
    n_max: int = 4
    n_evaluated: int = 0

    def n_coded_tokens(self, calls: Sequence[tuple[int, int]]) -> int:
        return 64 * sum(n * (1 + n_codings) for n_codings, n in calls)

    def rows(self, continuation: Continuation) -> KVRows:
        return coded_rows_of(N, seed=self.seeds[continuation.window]).slice(0, continuation.p)

    def costs_of(
        self, codings: Sequence[Callable[[KVRows], Sequence[KVRows]]], n: int
    ) -> list[FormatCost]:
        self.n_evaluated += self.n_coded_tokens([(len(codings), n)])
        errors: list[list[float]] = [[] for _ in codings]
        for continuation in self.plan.continuations[:n]:
            rows = self.rows(continuation)
            for coding, found in zip(codings, errors, strict=True):
                found.append(self._error(rows, coding(rows)))
        excesses = [NATS_OF_ERROR * float(np.mean(found)) for found in errors]
        return [FormatCost(each, each, 0.0, 1.0, 8.0, 64 * n) for each in excesses]

    def _error(self, rows: KVRows, parts: Sequence[KVRows]) -> float:
        assert [part.p0 for part in parts] == [0, *(part.p1 for part in parts[:-1])]
        errors = []
        for i in range(len(LAYOUT.planes)):
            found = np.concatenate([part.plane(i) for part in parts]).view(np.float16)
            wanted = rows.plane(i).view(np.float16)
            errors.append(((found.astype(float) - wanted) ** 2).mean())
        return float(np.mean(errors))


def measurer(*seeds: int, n_max: int = 4) -> Measurer:
    return cast(Measurer, FakeMeasurer((seeds[0], seeds[1]), n_max=n_max))


def test_what_is_chosen_was_measured() -> None:
    """The coarsest step within each bound, and a coarser one for what is shared; the basis has these alone."""
    first, second = measurer(1, 2), measurer(3, 4)
    found = calibration_of(IDENTITY, ("q8",) * LEVELS)
    found = msgspec.structs.replace(found, floor=replace(found.floor, kl=0.0))
    paused = 0

    def pause() -> None:
        nonlocal paused
        paused += 1

    made = learning.learn_transform(
        first,
        second,
        ROPE,
        found,
        IDENTITY.digest(),
        pause=pause,
    )
    assert paused > 10
    assert made.n_tokens == 2 * N
    assert made.choices.keys() == BOUNDS.keys()
    names = {name for choice in made.choices.values() for name in choice.levels}
    assert {coding_of(name)[1] for name in names} == {made.basis.digest[:8].hex()}
    assert {coding_of(name)[0] for name in names} == set(made.basis.codings)
    assert made.choices["small"].bits < made.choices["near"].bits < found.bits["q8"] / 2
    for fidelity, choice in made.choices.items():
        assert choice.bound == BOUNDS[fidelity]
        assert 0 < choice.cost.excess_max <= choice.bound
        assert choice.drift.excess == pytest.approx(choice.cost.excess_max)
        steps = [learning.STEP_NAMES.index(coding_of(name)[0]) for name in choice.levels]
        assert steps == sorted(steps)  # no deeper level has a coarser one
    again = read_basis(made.basis.data)
    assert (again.rope, again.row_identity) == (ROPE, IDENTITY.digest())


def test_what_is_to_be_evaluated_is_known_before() -> None:
    """At most so much, and never more later than at first."""
    first, second = measurer(1, 2), measurer(3, 4)
    found = calibration_of(IDENTITY, ("q8",) * LEVELS)
    announced = learning.expected_tokens(first, second, LAYOUT)
    totals: list[int] = []

    def n_done() -> int:
        return sum(cast(FakeMeasurer, each).n_evaluated for each in (first, second))

    learning.learn_transform(
        first,
        second,
        ROPE,
        found,
        IDENTITY.digest(),
        expect=lambda n: totals.append(n_done() + n),
    )
    assert len(totals) == len(BOUNDS)
    assert announced >= totals[0] >= totals[-1] >= n_done() > announced / 3


def test_nothing_is_chosen_that_costs_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "STEPS", (8.0, 6.0))
    monkeypatch.setattr(learning, "STEP_NAMES", ("s8", "s6"))
    found = calibration_of(IDENTITY, ("q8",) * LEVELS)
    made = learning.learn_transform(
        measurer(1, 2),
        measurer(3, 4),
        ROPE,
        found,
        IDENTITY.digest(),
    )
    assert not made.choices


def test_nothing_is_chosen_on_little_text() -> None:
    """However little it seems to cost."""
    found = calibration_of(IDENTITY, ("q8",) * LEVELS)
    few = measurer(3, 4, n_max=3)
    made = learning.learn_transform(measurer(1, 2), few, ROPE, found, IDENTITY.digest())
    assert not made.choices


def test_groups_are_as_large_as_the_rows_allow() -> None:
    def layout(n: int) -> KVLayout:
        return KVLayout((Plane(1, 2 * n),) * 8, (Plane(1, 2 * n),) * 8)

    assert learning.group_layers(layout(192), 7000) == 5
    assert learning.group_layers(layout(192), 1000) == 2
    assert learning.group_layers(layout(1024), 2048) == 1
    assert learning.group_layers(layout(2048), 5000) == 1
    with pytest.raises(TowerdError, match="takes 2048 tokens"):
        learning.group_layers(layout(1024), 2044)
