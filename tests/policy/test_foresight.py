"""The return-time model against direct evaluation, and the guard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerd.policy.foresight import Foresight
from towerd.policy.lru import LRU
from towerd.policy.predict.returns import (
    EDGES_S,
    ReturnModel,
    VisitClass,
    bin_of,
    gap_bucket,
    gittins,
    turn_bucket,
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
    assert gap_bucket(None) == 0
    assert gap_bucket(1e9) == 5
    assert [turn_bucket(n) for n in (0, 1, 4)] == [1, 2, 3]


@given(st.lists(st.floats(0.0, 1.0), min_size=len(EDGES_S), max_size=len(EDGES_S)))
def test_gittins_is_the_best_ratio(chances: list[float]) -> None:
    """Against every horizon, written out."""
    widths = [b - a for a, b in zip(EDGES_S, EDGES_S[1:], strict=False)] + [EDGES_S[-1]]
    for first, found in enumerate(gittins(chances)):
        ratios = []
        for last in range(first, len(chances)):
            won = spent = 0.0
            alive = 1.0
            for i in range(first, last + 1):
                p_return = alive * chances[i]
                won += p_return
                spent += (alive - p_return) * widths[i] + p_return * widths[i] / 2
                alive -= p_return
            ratios.append(won / spent)
        assert found == pytest.approx(max(ratios))


def test_model_learns_who_comes_back_soon() -> None:
    """Fast and slow classes; a slow one that is late; visits that never return count."""
    model = ReturnModel()
    assert model.index(TOOL, 1.0) == 0.0
    for _ in range(200):
        model.observe(TOOL, 0.0, 10.0, returned=True)
        model.observe(TURN, 0.0, 1000.0, returned=True)
    model.learn([])
    assert model.index(TOOL, 1.0) > 5 * model.index(TURN, 1.0)
    assert model.index(TURN, 900.0) > model.index(TURN, 1.0), "its time has come"
    before = model.index(TOOL, 1.0)
    model.learn([(TOOL, 0.0, 5000.0)] * 600)
    assert model.index(TOOL, 1.0) < before / 2
    other = VisitClass("tool_use", 3, 2, 2)
    assert model.index(other, 1.0) > 5 * model.index(TURN._replace(gap=3), 1.0)


def test_old_counts_fade() -> None:
    """What people did long ago is outvoted."""
    model = ReturnModel()
    for _ in range(20_001):
        model.observe(TOOL, 0.0, 2.0, returned=True)
    model.learn([])
    fast = model.index(TOOL, 0.0)
    for _ in range(20_001):
        model.observe(TOOL, 0.0, 4000.0, returned=True)
    model.learn([])
    assert model.index(TOOL, 0.0) < 0.7 * fast


def test_visits_follow_a_conversation() -> None:
    """Turn and gap go from a visit to the one that goes on from its tip."""
    visits = Visits()
    for turn in range(3):
        for key in range(turn + 1):
            visits.use(key, 10, 10.0 * turn)
        visits.set_tip(turn)
    assert visits.current.turn == 2
    assert visits.current.gap_s == 10.0
    visits.answered(2, 25.0, "end_turn")
    assert (visits.current.stop, visits.current.from_s) == ("end_turn", 5.0)
    visits.answered(2, 26.0, "tool_use")
    assert visits.current.stop == "end_turn", "an answer ends once"
    visits.ended(2)
    assert visits.index(visits.current, 30.0) == -1.0
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
        visits.use(i, 1, float(i))
        visits.set_tip(i)
        visits.answered(i, i + 0.5, f"reason {i}")
    assert len(visits._tips) <= TIPS_MAX
    assert len(visits._stops) <= 8


def test_ended_conversations_go_first() -> None:
    """Even when they were used last; the base they share with others stays."""
    policy = Foresight()
    policy.insert(1, 10, 0.0, None)
    policy.insert(2, 10, 0.0, 1)
    policy.insert(3, 10, 1.0, 1)
    policy.ended(3, 2.0)
    assert policy.victims(30, always) == [3, 2, 1]


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


def test_the_guard_falls_back() -> None:
    """Where forecasts lose against LRU the real cache follows LRU, and the shadows stay within
    the room that the real one has."""
    policy = Foresight()
    for i in range(50):
        serve(policy, [i % 9], float(i), 6)
    policy._lead = -1e9
    serve(policy, [1], 51.0, 6)
    assert not policy.trusts
    order = policy.victims(6, always)
    assert order == sorted(order, key=lambda key: policy._entries[key].used)
    policy._lead = 1e9
    serve(policy, [2], 52.0, 6)
    assert policy.trusts
    assert policy._pure.nbytes <= 7
    assert policy._lru.nbytes <= 7
