"""The return-time model against direct evaluation, and the guard."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.policy.foresight import Foresight
from towerd.policy.lru import LRU
from towerd.policy.predict.returns import (
    EDGES_S,
    WIDTHS_S,
    ReturnModel,
    VisitClass,
    bin_of,
    bucket,
    gittins,
)
from towerd.policy.visits import TIPS_MAX, Visits

TOOL = VisitClass("tool_use", 1, 1, 1)
TURN = VisitClass("end_turn", 1, 1, 1)


def always(key: int) -> bool:
    return True


def test_bins() -> None:
    """Any idle time has its bin, clocks that went back too."""
    assert bin_of(-5.0) == 0
    assert [bin_of(edge) for edge in EDGES_S] == list(range(len(EDGES_S)))
    assert bin_of(1e12) == len(EDGES_S) - 1
    assert bucket(None, (1.0, 2.0)) == 1
    assert [bucket(x, (1.0, 2.0)) for x in (0.5, 1.0, 1e9)] == [2, 3, 4]


def test_classes_lean_on_coarser_ones() -> None:
    """Down to that of all visits."""
    lineage = [at := VisitClass("x", 2, 3, 4)]
    while (up := at.coarser()) is not None:
        lineage.append(at := up)
    assert [tuple(of) for of in lineage] == [
        ("x", 2, 3, 4), ("x", 2, 3, 0), ("x", 2, 0, 0), ("x", 0, 0, 0), ("*", 0, 0, 0)
    ]  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.0, 1.0), min_size=len(EDGES_S), max_size=len(EDGES_S)))
def test_gittins_is_the_best_ratio(chances: list[float]) -> None:
    """Against every horizon, written out; a table of one class and one of two."""
    table = np.array([chances, chances[::-1]])
    assert np.array_equal(gittins(table)[:1], gittins(table[:1]))
    for first, found in enumerate(gittins(table)[0]):
        ratios = []
        for last in range(first, len(chances)):
            won = spent = 0.0
            alive = 1.0
            for i in range(first, last + 1):
                p_return = alive * chances[i]
                won += p_return
                spent += (alive - p_return) * WIDTHS_S[i] + p_return * WIDTHS_S[i] / 2
                alive -= p_return
            ratios.append(won / spent)
        assert found == pytest.approx(max(ratios))


def test_model_equals_kaplan_meier() -> None:
    """With many visits the chance of a return in a bin is returns / visits still away."""
    model = ReturnModel()
    n_returned, n_left = 40_000, 10_000
    for i in range(n_returned):
        model.observe(TOOL, EDGES_S[3 + i % 2], returned=True)
    for _ in range(n_left):
        model.observe(TOOL, EDGES_S[4], returned=False)
    model._n_seen = 0.0
    model.learn([])
    chances = np.zeros((1, len(EDGES_S)))
    chances[0, 3] = 20_000 / 50_000
    chances[0, 4] = 20_000 / 20_000  # those who left in this bin were not through with it
    assert model.index(TOOL, 0.0) == pytest.approx(gittins(chances)[0, 0], rel=0.01)


def test_model_learns_who_comes_back_soon() -> None:
    """Fast and slow classes; a slow one that is late; visits that never return count."""
    model = ReturnModel()
    assert model.index(TOOL, 1.0) == 0.0
    for _ in range(200):
        model.observe(TOOL, 10.0, returned=True)
        model.observe(TURN, 1000.0, returned=True)
    model.learn([])
    assert model.index(TOOL, 1.0) > 5 * model.index(TURN, 1.0)
    assert model.index(TURN, 900.0) > model.index(TURN, 1.0), "its time has come"
    before = model.index(TOOL, 1.0)
    model.learn([(TOOL, 5000.0)] * 600)
    assert model.index(TOOL, 1.0) < before / 2
    other = VisitClass("tool_use", 3, 2, 2)
    assert model.index(other, 1.0) > 5 * model.index(TURN._replace(gap=3), 1.0)


def test_old_counts_fade() -> None:
    """What people did long ago is outvoted."""
    model = ReturnModel()
    for _ in range(20_001):
        model.observe(TOOL, 2.0, returned=True)
    model.learn([])
    fast = model.index(TOOL, 0.0)
    for _ in range(20_001):
        model.observe(TOOL, 4000.0, returned=True)
    model.learn([])
    assert model.index(TOOL, 0.0) < 0.7 * fast


def test_visits_follow_a_conversation() -> None:
    """Turn, gap, stop reason and what is new go from a visit to the one that goes on from it."""
    visits = Visits()
    for turn in range(3):
        visit = visits.begin(10.0 * turn)
        for key in range(turn + 1):
            visit.nbytes += 10
            visits.returned(key, 10.0 * turn)
        visits.set_tip(turn)
        if turn == 1:
            visits.answered(1, 14.0, "tool_use")
    visit = visits.current
    assert (visit.turn, visit.gap_s, visit.before) == (2, 6.0, "tool_use")
    assert visit.nbytes - visit.base_nbytes == 10
    visits.answered(2, 25.0, "end_turn")
    assert (visit.stop, visit.answered_s) == ("end_turn", 25.0)
    visits.answered(2, 26.0, "tool_use")
    assert visit.stop == "end_turn", "an answer ends once"
    visits.ended(2)
    assert visit.ended
    visits.ended(77)
    visits.answered(77, 30.0, "x")


def test_a_turn_that_leaves_the_last_input_early_is_a_return() -> None:
    """The tip was split: its upper part is what the conversation goes on from."""
    policy = Foresight()
    policy.insert(1, 100, 0.0, None)
    policy.insert(2, 100, 10.0, None)
    policy.insert(7, 100, 15.0, None)
    policy.split(1, 3, 90, 20.0)
    policy.insert(4, 50, 20.0, 3)
    assert policy.visits.current.turn == 1
    assert policy.visits.current.gap_s == 20.0
    policy.split(2, 5, 10, 30.0)
    policy.insert(6, 50, 30.0, 5)
    assert policy.visits.current.turn == 0, "only a short base is shared"


def test_floods_are_bounded() -> None:
    """New conversations and new stop reasons without end take no more memory."""
    visits = Visits()
    for i in range(TIPS_MAX + 300):
        visits.begin(float(i)).nbytes += 1
        visits.set_tip(i)
        visits.answered(i, i + 0.5, f"reason {i}")
    assert len(visits.tips) <= TIPS_MAX
    assert len(visits._stops) <= 8


def test_ended_conversations_go_first() -> None:
    """Even when they were used last; the base they share with others stays."""
    policy = Foresight()
    policy.insert(1, 10, 0.0, None)
    policy.insert(2, 10, 0.0, 1)
    policy.insert(3, 10, 1.0, 1)
    policy.ended(3, 2.0)
    assert policy.victims(30, always) == [3, 2, 1]


def test_what_is_above_an_inner_end_goes_on() -> None:
    """An end from an inner key on leaves what is above it as good as before."""
    policy = Foresight()
    policy.insert(9, 10, 0.0, None)
    for key, parent in ((1, None), (2, 1), (3, 2)):
        policy.insert(key, 10, 1.0, parent)
    policy.ended(2, 2.0)
    assert policy.victims(30, always) == [3, 2, 9]
    policy.remove(3)
    policy.remove(2)
    assert policy.victims(10, always) == [9]


def test_a_base_outlives_its_last_conversation() -> None:
    """Many began on it, so that others will, although the last one is over."""
    policy = Foresight()
    policy.insert(50, 10, 0.0, None)
    policy.insert(1, 10, 1.0, None)
    for i in range(2, 6):
        policy.access(1, float(i))
        policy.insert(i, 10, float(i), 1)
    for i in range(2, 6):
        policy.ended(i, 6.0)
    assert policy.victims(50, always) == [2, 3, 4, 5, 50]


def serve(policy: Foresight | LRU, path: list[int], now: float, room: int) -> int:
    """One request for a chain of keys of one byte; returns the keys found."""
    n = next((i for i, key in enumerate(path) if key not in policy), len(path))
    if n:
        policy.access(path[n - 1], now)
    for i in range(n, len(path)):
        policy.insert(path[i], 1, now, path[i - 1] if i else None)
    for victim in policy.victims(policy.nbytes - room, always):
        policy.remove(victim)
    return n


def fast_and_slow(policy: Foresight | LRU) -> int:
    """Five conversations return every 7 seconds, and something new that never returns comes
    every second: LRU with room for six finds nothing."""
    hits = 0
    for i in range(3000):
        hits += serve(policy, [10_000 + i], i + 0.5, 6)
        if i % 7 < 5:
            hits += serve(policy, [i % 7], float(i) + 0.7, 6)
        policy.answered(10_000 + i, i + 0.6, "end_turn")
    return hits


def test_foresight_knows_who_returns() -> None:
    """It learns the two kinds from their past alone."""
    assert fast_and_slow(LRU()) == 0
    policy = Foresight()
    assert fast_and_slow(policy) > 1000
    assert policy.trusts


def test_the_guard_changes_sides() -> None:
    """The real cache follows the side that found more, and the shadow plays the other one from
    the same start, within the room that the real one has."""
    policy = Foresight()
    for i in range(50):
        serve(policy, [i % 9], float(i), 6)
    assert not policy.trusts, "forecasts must earn trust"
    order = policy.victims(6, always)
    assert order == sorted(order, key=lambda key: policy._entries[key].used)
    policy._lead = -1e9
    serve(policy, [1], 51.0, 6)
    assert policy.trusts
    assert isinstance(policy._shadow, LRU)
    policy._lead = -1e9
    serve(policy, [2], 52.0, 6)
    assert not policy.trusts
    assert not isinstance(policy._shadow, LRU), "forecasts go on being judged"
    for i in range(9):
        serve(policy, [i], 53.0 + i, 6)
        assert policy._shadow.nbytes <= 7
