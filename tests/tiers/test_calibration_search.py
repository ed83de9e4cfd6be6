"""The calibration's search against brute force, and its result's JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.drift import Drift
from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import NATIVE, KVLayout, Plane
from towerd.tiers.formats.calibration import (
    ALL_NATIVE,
    BOUNDS,
    CANDIDATES,
    LEVELS,
    Calibration,
    DriftSample,
    Floor,
    FormatChoice,
    FormatCost,
    Table,
    allows,
    bits_of,
    bound_of,
    check_table,
    format_cost,
    formats_digest,
    interval,
    sizes,
    squeezed_format,
)
from towerd.tiers.formats.format_search import (
    COARSE,
    SPARE_TABLES,
    calibrate,
    choose,
    coarse_tables,
    measure_grid,
)

F16 = KVLayout((Plane(1, 256),) * 2, (Plane(1, 256),) * 2)
BITS = sizes(F16)
FORMATS = [name for name in BITS if name != NATIVE]
FLOOR = 0.0033
"""That of a model of 135M parameters in 4 bits."""
N_EACH = 64


class Fake:
    """A meter of costs by a formula, which remembers what was asked for, and on how much text."""

    def __init__(
        self, excess: Callable[[Table], float], floor_kl: float = FLOOR, ci: float = 0.0
    ) -> None:
        """ci: of an excess that was measured on one continuation; more make it smaller"""
        self.n_max = 64
        self.excess = excess
        self.floor_kl = floor_kl
        self.ci = ci
        self.asked: list[tuple[Table, int]] = []

    def n_tokens(self, calls: Sequence[tuple[Sequence[Table], int]]) -> int:
        known = {(table, i) for table, m in self.asked for i in range(m)}
        new = {(table, i) for tables, n in calls for table in tables for i in range(n)}
        return N_EACH * len(new - known)

    def floor(self, n: int) -> Floor:
        return Floor(self.floor_kl, 0.0, 0.97, "one token at a time", {}, N_EACH * n)

    def costs(self, tables: Sequence[Table], n: int) -> list[FormatCost]:
        self.asked += [(table, n) for table in tables]
        return [self._cost(table, n) for table in tables]

    def _cost(self, table: Table, n: int) -> FormatCost:
        if table == ALL_NATIVE:
            return FormatCost(0.0, 0.0, 0.0, 1.0, 2.0, N_EACH * n)
        excess = self.excess(table)
        return FormatCost(self.floor_kl + excess, excess, self.ci / n**0.5, 0.97, 2.0, N_EACH * n)


def additive(weights: Sequence[float], excess: float = 1.0) -> Callable[[Table], float]:
    """Each level costs its weight times 4^-bits; tables of several levels `excess` times more."""

    def kl(table: Table) -> float:
        each = [w * 4.0 ** -BITS[f] for w, f in zip(weights, table, strict=True) if f != NATIVE]
        return float(sum(each)) * (excess if len(each) > 1 else 1.0)

    return kl


def brute_force(kl: Callable[[Table], float], bound: float) -> float:
    """The fewest bits of any table within the bound whose bits do not fall with depth."""
    tables = itertools.product(BITS, repeat=LEVELS)
    return min(
        bits_of(t, BITS)
        for t in tables
        if kl(t) <= bound and all(BITS[a] <= BITS[b] for a, b in itertools.pairwise(t))
    )


def test_sizes_are_ordered_and_leave_out_what_gains_nothing() -> None:
    assert list(BITS) == ["q4h", "q4", "q4ah", "q5h", "q6h", "q6", "q8h", "q8", NATIVE]
    assert BITS[NATIVE] == 16
    assert set(FORMATS) == set(CANDIDATES)
    q8_0 = BY_NAME["q8_0"]
    quantized = KVLayout((Plane(q8_0.type_id, q8_0.row_bytes(128)),), (Plane(1, 256),))
    found = sizes(quantized)
    assert found["q8h"] == (8.5 + 8.5) / 2  # the keys stay as they are, the values shrink
    assert found[NATIVE] == (8.5 + 16) / 2
    odd = KVLayout((Plane(1, 2 * 24),), (Plane(1, 2 * 24),))
    assert list(sizes(odd)) == [NATIVE]


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.floats(1e-2, 1e4)] * 3), st.floats(1e-6, 1.0))
def test_search_is_brute_force_when_costs_add_up(
    weights: tuple[float, float, float], bound: float
) -> None:
    kl = additive(weights)
    meter = Fake(kl)
    chosen = choose(meter, measure_grid(meter, FORMATS), BITS, bound)
    assert chosen.bits == pytest.approx(brute_force(kl, bound))
    assert chosen.cost.excess <= bound


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.floats(1e-2, 1e4)] * 3), st.floats(1e-6, 1.0), st.floats(1.0, 3.0))
def test_bound_holds_when_costs_add_up_to_more(
    weights: tuple[float, float, float], bound: float, factor: float
) -> None:
    kl = additive(weights, factor)
    meter = Fake(kl)
    grid = measure_grid(meter, FORMATS)
    n_grid = len(meter.asked)
    chosen = choose(meter, grid, BITS, bound)
    assert chosen.levels == ALL_NATIVE or kl(chosen.levels) <= bound
    assert len(meter.asked) - n_grid < 30  # it learns from what it measures


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1.0))
def test_any_costs_give_a_table_within_the_bound(seed: int, bound: float) -> None:
    """Noise, costs that do not fall with bits: the result has still been measured, or is native."""

    def kl(table: Table) -> float:
        return (hash((seed, table)) % 1000) / 1000

    meter = Fake(kl)
    chosen = choose(meter, measure_grid(meter, FORMATS), BITS, bound)
    assert chosen.levels == ALL_NATIVE or kl(chosen.levels) <= bound
    assert all(BITS[a] <= BITS[b] for a, b in itertools.pairwise(chosen.levels))


def test_native_where_even_8_bits_cost_too_much() -> None:
    _, _, choices = calibrate(Fake(additive((1e9, 1e9, 1e9))), BITS)
    assert {choice.levels for choice in choices.values()} == {ALL_NATIVE}
    assert all(choice.cost.kl == 0 for choice in choices.values())


@pytest.mark.parametrize("floor_kl", [0.0, FLOOR])
def test_noise_of_the_model_takes_no_bits_away(floor_kl: float) -> None:
    """Every disturbance costs the floor, which is above the bound of near; what decides is what
    a format adds to it. These are a 4-bit model's figures."""
    uniform = {"q4h": 0.0034, "q5h": 0.0009, "q6h": 0.0, "q8h": 0.0001}

    def excess(table: Table) -> float:
        each = [uniform.get(name, 0.01) / LEVELS for name in table if name != NATIVE]
        return sum(each)

    floor, _, choices = calibrate(Fake(excess, floor_kl), BITS)
    assert floor.kl == floor_kl
    assert choices["near"].bits < 6.6
    assert choices["near"].cost.excess <= 0.002
    assert choices["small"].levels == ("q4h",) * LEVELS


def test_excess_is_measured_until_it_is_known_to_a_third_of_the_bound() -> None:
    meter = Fake(additive((3.0, 10.0, 30.0)), ci=0.0052)
    chosen = choose(meter, measure_grid(meter, FORMATS), BITS, 0.002)
    assert chosen.cost.ci <= chosen.bound / 3
    assert chosen.cost.n_tokens == N_EACH * 64 > N_EACH * COARSE
    assert chosen.cost.excess + chosen.cost.ci <= 0.002
    coarse = Fake(additive((3.0, 10.0, 30.0)), ci=0.0001)
    chosen = choose(coarse, measure_grid(coarse, FORMATS), BITS, 0.002)
    assert {n for _, n in coarse.asked} == {COARSE}


def test_what_is_not_surely_within_the_bound_is_not_taken() -> None:
    """The text ends before the interval does: a safer table, whose whole interval is within."""
    noisy = Fake(additive((3.0, 10.0, 30.0)), ci=0.012)
    sure = Fake(additive((3.0, 10.0, 30.0)))
    choices = [choose(meter, measure_grid(meter, FORMATS), BITS, 0.002) for meter in (noisy, sure)]
    assert choices[0].cost.ci > choices[0].bound / 3
    assert choices[0].cost.excess_max <= 0.002
    assert choices[0].bits > choices[1].bits


@pytest.mark.parametrize("n_max", [64, 3])
def test_nothing_is_chosen_by_luck(n_max: int) -> None:
    """The excess is below 0 by chance; its interval is as wide as the bound, or made of too few to be known.
    Rows then stay native, which is found without measuring every table."""
    meter = Fake(lambda _: -0.001, ci=0.02 if n_max > 3 else 0.0)
    meter.n_max = n_max
    grid = measure_grid(meter, FORMATS)
    n_grid = len(meter.asked)
    chosen = choose(meter, grid, BITS, 0.002)
    assert chosen.levels == ALL_NATIVE
    assert chosen.bits == BITS[NATIVE]
    assert chosen.cost == grid.native
    assert len({table for table, _ in meter.asked[n_grid:]}) <= 3
    wide = choose(meter, grid, BITS, 0.02)  # what a wider bound can tell
    assert (wide.levels == ALL_NATIVE) is (n_max == 3)


def test_bound_of_near_grows_with_the_floor() -> None:
    assert bound_of("near", 0.0) == bound_of("near", FLOOR) == BOUNDS["near"]
    assert bound_of("near", 0.05) == pytest.approx(0.005)
    assert bound_of("small", 0.05) == BOUNDS["small"]
    assert allows("near", Drift(0.0052, FLOOR))
    assert not allows("near", Drift(0.0054, FLOOR))
    assert not allows("exact", Drift(0.0, 0.0))


def test_cost_is_paired_with_the_floor() -> None:
    """Texts differ in how hard they are more than formats do; the difference knows nothing of
    it."""
    hard = (0.001, 0.009, 0.002, 0.02)
    floor = [DriftSample(kl, 1.0, 1.0) for kl in hard]
    stored = [DriftSample(kl + 0.001, 0.5, 1.0) for kl in hard]
    found = format_cost(stored, floor, N_EACH)
    assert found.excess == pytest.approx(0.001)
    assert found.ci == pytest.approx(0.0, abs=1e-12)
    assert found.floor_kl == pytest.approx(0.008)
    assert (found.top1, found.n_tokens) == (0.5, 4 * N_EACH)


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    draws = rng.normal(3.0, 2.0, (4000, 8))
    hits = sum(abs(mean - 3.0) <= half for mean, half in map(interval, draws.tolist()))
    assert hits / len(draws) == pytest.approx(0.95, abs=0.012)


def test_same_measurements_give_the_same_choice() -> None:
    kl = additive((3.0, 10.0, 30.0))
    first, second = calibrate(Fake(kl), BITS), calibrate(Fake(kl), BITS)
    assert first == second
    near, small = first[2]["near"], first[2]["small"]
    assert near.cost.excess <= BOUNDS["near"] < small.cost.excess <= BOUNDS["small"]
    assert small.bits < near.bits


def test_coarse_tables_are_asked_for_once() -> None:
    tables = coarse_tables(FORMATS)
    assert len(tables) == len(set(tables)) == 1 + len(FORMATS)


def test_what_is_expected_grows_only_by_tables_that_fail() -> None:
    """Evaluated tokens and those to come are known before each part, never fewer than there are, and no more than
    was expected at first as long as no more tables fail than are expected to."""

    class Counted(Fake):
        def __init__(self, excess: Callable[[Table], float]) -> None:
            super().__init__(excess)
            self.done, self.totals = 0, list[int]()

        def expect(self, n_tokens: int) -> None:
            self.totals.append(self.done + n_tokens)

        def costs(self, tables: Sequence[Table], n: int) -> list[FormatCost]:
            self.done += self.n_tokens([(tables, n)])
            assert self.done <= self.totals[-1]
            return super().costs(tables, n)

    for factor in (1.0, 3.0, 9.0):  # whole tables cost what their levels say, or more
        meter = Counted(additive((3.0, 10.0, 30.0), factor))
        totals = meter.totals
        calibrate(meter, BITS, meter.expect)
        n_tried = len({table for table, _ in meter.asked} - set(coarse_tables(FORMATS))) - LEVELS
        n_more = max(0, n_tried - len(BOUNDS) - SPARE_TABLES)
        most = totals[0] + n_more * N_EACH * meter.n_max
        assert max(totals) <= most
        assert meter.done <= totals[-1] <= max(totals[0], most)


def calibration() -> Calibration:
    floor, grid, choices = calibrate(Fake(additive((3.0, 10.0, 30.0))), BITS)
    return Calibration("ab", formats_digest(), "cd", 1.5, BITS, floor, grid, choices)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 10.0])
def test_squeezed_within_the_bound_of_small(scale: float) -> None:
    """The smallest format whose cost and that of the first encoding fit together; none that takes
    no less than what the rows are in, and none beyond `small` itself."""
    floor, grid, choices = calibrate(Fake(additive((3.0 * scale, 10.0, 30.0))), BITS)
    found = Calibration("ab", formats_digest(), "cd", 1.5, BITS, floor, grid, choices)
    first = choices["near"]
    fits = {
        name: first.cost.excess_max + cost.excess_max <= BOUNDS["small"]
        for name, cost in grid.uniform.items()
    }
    smaller = [name for name, fit in fits.items() if fit and BITS[name] < BITS[first.levels[-1]]]
    squeezed = squeezed_format(found, "near")
    if squeezed is None:
        assert not smaller
    else:
        assert BITS[squeezed.name] <= min(BITS[name] for name in [*smaller, squeezed.name])
        assert squeezed.drift.excess <= BOUNDS["small"]
        assert squeezed.drift.excess >= first.cost.excess
    assert squeezed_format(found, "small") is None


def test_json_round_trip() -> None:
    made = calibration()
    assert Calibration.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert Calibration.from_json(msgspec.json.decode(msgspec.json.encode(made.to_json()))) == made


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"grid": 1},
        {"floor": {"kl": "x"}},
        {
            "choices": {
                "near": {
                    "levels": ["q4h"],
                    "cost": {"kl": 0, "excess": 0, "ci": 0, "top1": 1, "ppl": 1, "n_tokens": 1},
                    "bits": 1,
                    "bound": 1,
                }
            }
        },
        {"choices": {"near": 5}},
    ],
)
def test_strange_json_is_refused(change: dict[str, object]) -> None:
    value = calibration().to_json() | change
    with pytest.raises(ValueError, match=r"calibration|levels"):
        Calibration.from_json(value)


@pytest.mark.parametrize("table", [("q4h",), ("q4h", "q8", "f16"), ("q4h", "q8", "nope")])
def test_bad_tables_are_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="levels"):
        check_table(table)


def test_choice_keeps_order_of_levels() -> None:
    """What deeper levels get is the last entry."""
    kl = additive((0.1, 10.0, 1000.0))
    meter = Fake(kl)
    chosen = choose(meter, measure_grid(meter, FORMATS), BITS, 0.005)
    assert isinstance(chosen, FormatChoice)
    assert BITS[chosen.levels[0]] < BITS[chosen.levels[2]]
