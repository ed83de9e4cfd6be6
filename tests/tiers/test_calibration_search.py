"""The calibration's search against brute force, and its result's JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import NATIVE, KVLayout, Plane
from towerd.tiers.calibration import (
    BOUNDS,
    CANDIDATES,
    LEVELS,
    Calibration,
    Choice,
    Cost,
    Table,
    bits_of,
    calibrate,
    check_table,
    choose,
    formats_digest,
    grid_tables,
    measure_grid,
    sizes,
)

F16 = KVLayout((Plane(1, 256),) * 2, (Plane(1, 256),) * 2)
BITS = sizes(F16)
FORMATS = [name for name in BITS if name != NATIVE]


def cost(kl: float) -> Cost:
    return Cost(kl, 1.0, 2.0)


class Fake:
    """Costs by a formula, and which tables were asked for."""

    def __init__(self, kl: Callable[[Table], float]) -> None:
        self.kl = kl
        self.asked: list[Table] = []

    def __call__(self, tables: Sequence[Table]) -> list[Cost]:
        self.asked += tables
        return [cost(self.kl(table)) for table in tables]


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
    measure = Fake(kl)
    chosen = choose(measure, measure_grid(measure, FORMATS), BITS, bound)
    assert chosen.bits == pytest.approx(brute_force(kl, bound))
    assert chosen.cost.kl == kl(chosen.levels) <= bound


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.floats(1e-2, 1e4)] * 3), st.floats(1e-6, 1.0), st.floats(1.0, 3.0))
def test_bound_holds_when_costs_add_up_to_more(
    weights: tuple[float, float, float], bound: float, excess: float
) -> None:
    kl = additive(weights, excess)
    measure = Fake(kl)
    grid = measure_grid(measure, FORMATS)
    n_grid = len(measure.asked)
    chosen = choose(measure, grid, BITS, bound)
    assert kl(chosen.levels) <= bound
    assert len(measure.asked) - n_grid < 30  # it learns from what it measures


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_any_costs_give_a_table_within_the_bound(seed: int, bound: float) -> None:
    """Noise, costs that do not fall with bits: the result has still been measured, or is native."""

    def kl(table: Table) -> float:
        return (hash((seed, table)) % 1000) / 1000 if set(table) != {NATIVE} else 0.0

    measure = Fake(kl)
    chosen = choose(measure, measure_grid(measure, FORMATS), BITS, bound)
    assert kl(chosen.levels) <= bound
    assert all(BITS[a] <= BITS[b] for a, b in itertools.pairwise(chosen.levels))


def test_native_where_even_8_bits_cost_too_much() -> None:
    kl = additive((1e9, 1e9, 1e9))
    measure = Fake(kl)
    _, choices = calibrate(measure, BITS)
    assert {choice.levels for choice in choices.values()} == {(NATIVE,) * 3}
    assert all(choice.cost.kl == 0 for choice in choices.values())


def test_same_measurements_give_the_same_choice() -> None:
    kl = additive((3.0, 10.0, 30.0))
    first, second = calibrate(Fake(kl), BITS), calibrate(Fake(kl), BITS)
    assert first == second
    near, small = first[1]["near"], first[1]["small"]
    assert near.cost.kl <= BOUNDS["near"] < small.cost.kl <= BOUNDS["small"]
    assert small.bits < near.bits


def test_grid_asks_for_every_table_once() -> None:
    tables = grid_tables(FORMATS)
    assert len(tables) == len(set(tables)) == 1 + 4 * len(FORMATS)


def calibration() -> Calibration:
    grid, choices = calibrate(Fake(additive((3.0, 10.0, 30.0))), BITS)
    return Calibration("ab", formats_digest(), "cd", 512, 1.5, BITS, grid, choices)


def test_json_round_trip() -> None:
    made = calibration()
    assert Calibration.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert Calibration.from_json(msgspec.json.decode(msgspec.json.encode(made.to_json()))) == made


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"grid": 1},
        {"n_tokens": "x"},
        {
            "choices": {
                "near": {"levels": ["q4h"], "cost": {"kl": 0, "top1": 1, "ppl": 1}, "bits": 1}
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
    measure = Fake(kl)
    chosen = choose(measure, measure_grid(measure, FORMATS), BITS, 0.005)
    assert isinstance(chosen, Choice)
    assert BITS[chosen.levels[0]] < BITS[chosen.levels[2]]
