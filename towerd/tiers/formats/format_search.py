"""The search for the smallest stored formats whose measured excess stays within a bound.

The search is pure and measures through a `Meter`. Formats are first measured coarsely. The chosen
table is then measured as a whole, on more and more text, until its excess is known to a third of
the bound.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from towerd.slots.layout import NATIVE
from towerd.tiers.formats.calibration import (
    ALL_NATIVE,
    BOUNDS,
    LEVELS,
    SHARES,
    Floor,
    FormatChoice,
    FormatCost,
    Grid,
    Table,
    bits_of,
    bound_of,
)
from towerd.tiers.shrink import SINKS, NativeEnds

log = logging.getLogger(__name__)

COARSE = 16
"""Continuations that every format is measured on."""
CONTINUATIONS_MIN = 4
"""Fewer do not show how much costs vary: their interval is too small (`t_quantile`)."""
_NOISY_MAX = 3
"""After so many tables of which the text cannot tell what they cost no others are tried."""
ENDS = (NativeEnds(0, 0), NativeEnds(SINKS, 0), NativeEnds(SINKS, 16), NativeEnds(SINKS, 32))
"""What is tried, fewest first."""
SPARE_TABLES = 2
"""Tables that are expected to be tried beyond one for each fidelity."""
_TELLING = 10
"""An expected excess below the bound divided by this is not significant."""


class Meter(Protocol):
    """Measures on the first continuations of a text, and caches its results."""

    @property
    def n_max(self) -> int:
        """Number of continuations available."""
        ...

    def n_tokens(self, calls: Sequence[Call]) -> int:
        """Tokens that `costs` would evaluate in these calls, one after the other."""
        ...

    def floor(self, n: int) -> Floor:
        """The model's noise on the first `n` continuations."""
        ...

    def costs(self, tables: Sequence[Table], n: int) -> Sequence[FormatCost]:
        """Costs of tables on the first `n` continuations, in the order of `tables`."""
        ...


class EndsMeter(Protocol):
    """Measures short chats."""

    @property
    def n_max(self) -> int:
        """Number of continuations available."""
        ...

    def costs(
        self, tables: Sequence[Table], n: int, ends: NativeEnds = ...
    ) -> Sequence[FormatCost]:
        """Costs of tables with these native ends on the first `n` continuations."""
        ...


Call: TypeAlias = tuple[Sequence[Table], int]
"""The arguments of `Meter.costs`."""
Expect: TypeAlias = Callable[[int], object]
"""Told how many tokens will be evaluated from now on at most, unless more tables than SPARE_TABLES fail: which
ones are tried, and on how much text, depends on what those before them cost."""


def calibrate(
    meter: Meter, bits: Mapping[str, float], expect: Expect = lambda _: None
) -> tuple[Floor, Grid, dict[str, FormatChoice]]:
    """The floor, the grid and the choice of every fidelity. `bits` as returned by `sizes`."""
    n = _coarse(meter)
    expect(expected_tokens(meter, bits))
    grid = measure_grid(meter, [name for name in bits if name != NATIVE])
    floor_kl = meter.floor(n).kl
    choices, later = {}, _choice_calls(meter)
    for i, name in enumerate(BOUNDS, start=1):
        bound, n_after = bound_of(name, floor_kl), len(BOUNDS) - i
        choices[name] = choose(meter, grid, bits, bound, expect, later, n_after)
    n_each = grid.native.n_tokens // n
    n_floor = max(choice.cost.n_tokens for choice in choices.values()) // n_each
    return meter.floor(n_floor), grid, choices


def expected_tokens(meter: Meter, bits: Mapping[str, float]) -> int:
    """Tokens that `calibrate` evaluates if it tries SPARE_TABLES besides one table for each fidelity, on all of
    the text: each format, each level and the floor before that."""
    formats, n = [name for name in bits if name != NATIVE], _coarse(meter)
    singles = [(f"level {level}",) * LEVELS for level in range(LEVELS)] if formats else []
    return meter.n_tokens([(coarse_tables(formats), n), (singles, n), *_choice_calls(meter)])


def expected_of_ends(meter: Meter, n_fidelities: int = len(BOUNDS)) -> int:
    """Tokens that `choose_ends` evaluates for so many fidelities if it has to try all."""
    names = [f"{i} {ends}" for i in range(n_fidelities) for ends in ENDS]
    return meter.n_tokens([([(name,) * LEVELS], meter.n_max) for name in names])


def _choice_calls(meter: Meter) -> list[Call]:
    """The measurements of tables that are not known yet."""
    names = [f"table {i}" for i in range(len(BOUNDS) + SPARE_TABLES)]
    return [([(name,) * LEVELS], meter.n_max) for name in names]


def _single(name: str, level: int) -> Table:
    """`name` in one level alone."""
    return ALL_NATIVE[:level] + (name,) + ALL_NATIVE[level + 1 :]


def coarse_tables(formats: Sequence[str]) -> list[Table]:
    """The tables that the search measures first: all native, and each format in all levels."""
    return [ALL_NATIVE, *((name,) * LEVELS for name in formats)]


def measure_grid(meter: Meter, formats: Sequence[str]) -> Grid:
    """Measure `coarse_tables`, and for the levels' weights one format in each level alone."""
    n = _coarse(meter)
    native, *costs = meter.costs(coarse_tables(formats), n)
    uniform = dict(zip(formats, costs, strict=True))
    return Grid(native, uniform, _weights(meter, uniform, n))


def _weights(meter: Meter, uniform: Mapping[str, FormatCost], n: int) -> tuple[float, ...]:
    """Each level's share of a table's excess.

    Errors of different levels are independent and KL divergence is of second order in them, so
    the excesses of the levels add up to that of a table, and each level has the same share of it
    for any format. The format whose excess is nearest to the widest bound shows the shares best:
    it is large enough to measure and still of second order."""
    widest = max(BOUNDS.values())
    telling = {name: cost.excess for name, cost in uniform.items() if cost.excess > 0}
    if not telling:
        return SHARES
    name = min(telling, key=lambda each: abs(math.log(telling[each] / widest)))
    singles = [_single(name, level) for level in range(LEVELS)]
    excess = [max(0.0, cost.excess) for cost in meter.costs(singles, n)]
    total = sum(excess)
    return tuple(each / total for each in excess) if total else SHARES


def choose(
    meter: Meter,
    grid: Grid,
    bits: Mapping[str, float],
    bound: float,
    expect: Expect = lambda _: None,
    later: list[Call] | None = None,
    n_after: int = 0,
) -> FormatChoice:
    """The smallest table whose excess is at most `bound` up to the end of its 95 % interval.

    A deeper level never gets fewer bits than the one above it: its rows are nearer to the
    queries, so they weigh more (Theorem 19), and a conversation without bases lies in the
    deepest level as a whole and must not cost more than the table.

    Tables are tried in order of size as far as the sum of their levels' expected excesses lets
    them pass. When one is found to cost more than expected, the following ones are expected to
    cost more by as much. All native passes any bound, so there always is a result.

    It is also the result where the text is too short to tell: with fewer than CONTINUATIONS_MIN
    continuations, or an interval as wide as the bound. No table is chosen by luck.

    later: measurements that are expected, to tell `expect`; those made here are taken off, as long as
    `n_after` are left, which come after this"""
    later = [] if later is None else later
    factor, n_noisy = 1.0, 0 if meter.n_max >= CONTINUATIONS_MIN else _NOISY_MAX
    for table, expected in _by_size(grid, bits):
        if table == ALL_NATIVE or n_noisy == _NOISY_MAX:
            break
        if expected * factor > bound:
            continue
        del later[max(n_after, len(later) - 1) :]
        expect(meter.n_tokens([([table], meter.n_max), *later]))
        cost = settled(meter, table, bound)
        if cost.is_within(bound):
            return FormatChoice(table, cost, bits_of(table, bits), bound)
        n_noisy += cost.ci >= bound
        factor = max(factor, cost.excess_max / max(expected, bound / _TELLING))
    if n_noisy:
        log.warning(
            "the calibration text is too short to tell what stored formats cost: rows stay as computed",
            extra={"continuations": meter.n_max, "bound": bound},
        )
    return FormatChoice(ALL_NATIVE, grid.native, bits_of(ALL_NATIVE, bits), bound)


def choose_ends(meter: EndsMeter, choice: FormatChoice) -> FormatChoice:
    """`choice` with the fewest native ends with which short chats in its last level's format cost no more
    than its bound, up to the end of the 95 % interval; with the default ones if that takes as many, or if
    too few were measured to tell."""
    stored = [name for name in choice.levels if name != NATIVE]
    if not stored:
        return choice
    table = (stored[-1],) * LEVELS
    whole = meter.costs([table], meter.n_max, ENDS[0])[0]
    choice = replace(choice, whole=whole)
    for ends in ENDS if choice.levels[-1] != NATIVE else ():
        cost = meter.costs([table], meter.n_max, ends)[0]
        if meter.n_max >= CONTINUATIONS_MIN and cost.is_within(choice.bound):
            return replace(choice, ends=ends)
    return choice


def settled(meter: Meter, table: Table, bound: float) -> FormatCost:
    """The cost of a table, measured on more and more text until its excess is known to a third of
    the bound, certainly exceeds the bound, or the text ends."""
    n = _coarse(meter)
    while True:
        cost = meter.costs([table], n)[0]
        if n >= meter.n_max or cost.ci <= bound / 3 or cost.excess - cost.ci > bound:
            return cost
        n = min(2 * n, meter.n_max)


def _coarse(meter: Meter) -> int:
    return min(COARSE, meter.n_max)


def _by_size(grid: Grid, bits: Mapping[str, float]) -> list[tuple[Table, float]]:
    """Every table whose bits do not decrease with depth, with its expected excess; smallest first,
    equals by preference (an order by cost would be random: they cost nearly the same)."""
    order = {name: i for i, name in enumerate(bits)}
    found = []
    for table in itertools.product(order, repeat=LEVELS):
        if any(bits[a] > bits[b] for a, b in itertools.pairwise(table)):
            continue
        expected = sum(
            weight * max(0.0, grid.uniform[name].excess)
            for weight, name in zip(grid.weights, table, strict=True)
            if name != NATIVE
        )
        rank = (round(bits_of(table, bits), 9), [order[name] for name in table])
        found.append((rank, table, expected))
    found.sort(key=lambda item: item[0])
    return [(table, expected) for _, table, expected in found]
