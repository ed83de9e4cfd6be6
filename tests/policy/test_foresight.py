"""The return-time model against direct evaluation, and the guard."""

from __future__ import annotations

import copy
import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import planted

from towerd.policy.base import LRU
from towerd.policy.foresight import Foresight
from towerd.policy.predict.classes import Classes, VisitClass, bucket
from towerd.policy.predict.hazard import DOUBT, HazardNet
from towerd.policy.predict.returns import (
    EDGES_S,
    N_BINS,
    VISITS_MAX,
    ReturnModel,
    bin_of,
)
from towerd.policy.visits import Visits


def always(key: int) -> bool:
    return True


def test_bins() -> None:
    """Any idle time has a bin, even after a clock went back."""
    assert bin_of(-5.0) == 0
    assert [bin_of(edge) for edge in EDGES_S] == list(range(len(EDGES_S)))
    assert bin_of(1e12) == len(EDGES_S) - 1


KIND = VisitClass("tool_use", 1, 1)


def features(kind: float) -> array[float]:
    return array("d", [1.0, kind, 0.0])


def lived(model: ReturnModel, kinds: list[tuple[VisitClass, float, float]], n: int) -> None:
    """n visits of every (class, feature, idle time), asked one after the other a second apart;
    inf: it stays away."""
    for i in range(n * len(kinds)):
        of, kind, idle_s = kinds[i % len(kinds)]
        number = model.asked(of, features(kind), float(i))
        if idle_s < float("inf"):
            model.returned(number, i + idle_s)


def test_classes_lean_on_coarser_ones() -> None:
    """Down to that of all visits; a class without a curve uses the finest one above it."""
    lineage = [at := VisitClass("x", 2, 3)]
    while (up := at.coarser()) is not None:
        lineage.append(at := up)
    assert [tuple(of) for of in lineage] == [("x", 2, 3), ("x", 2, 0), ("x", 0, 0), ("*", 0, 0)]
    classes = Classes(4)
    of = np.array([classes.number(lineage[1])] * 5)
    classes.learn(of, np.array([0, 0, 1, 2, 3]), np.array([True, True, True, False, False]))
    assert classes.known(lineage[0]) == classes.number(lineage[1])
    assert bucket(None, (1.0, 2.0)) == 1
    assert [bucket(x, (1.0, 2.0)) for x in (0.5, 1.0, 1e9)] == [2, 3, 4]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.booleans()), max_size=40))
def test_curves_by_hand(visits: list[tuple[str, int, bool]]) -> None:
    """Returns / visits still away, with the coarser class as a prior of ten visits."""
    classes = Classes(4)
    of = np.array([classes.number(VisitClass(name)) for name, _, _ in visits], np.int64)
    last = np.array([bin_ for _, bin_, _ in visits], np.int64)
    classes.learn(of, last, np.array([came for _, _, came in visits], np.bool_))
    for b in range(4):
        prior = 0.01
        for names in ("ab", "a"):
            mine = [v for v in visits if v[0] in names]
            came = sum(v[1] == b and v[2] for v in mine)
            away = sum(v[1] > b or (v[1] == b and v[2]) for v in mine)
            prior = (came + 10 * prior) / (away + 10)
        assert classes.curves[classes.known(VisitClass("a")), b] == pytest.approx(prior)


def test_network_corrects_its_class() -> None:
    """Within one class fast and slow visits are told apart by their features alone."""
    model = ReturnModel(3)
    of, x = [KIND, KIND], np.array([features(1.0), features(-1.0)])
    assert not np.any(model.tables(of, x))
    lived(model, [(KIND, 1.0, 10.0), (KIND, -1.0, 1000.0)], 400)
    for _ in range(30):
        model.learn(3000.0)
    soon, late = model.tables(of, x)
    assert soon[bin_of(1.0)] > 5 * late[bin_of(1.0)]
    assert late[bin_of(900.0)] > late[bin_of(1.0)], "its time has come"


def test_idle_times_without_visits_stay_near_the_curve() -> None:
    """The correction of idle times that no visit has had stays small."""
    model = ReturnModel(3)
    lived(model, [(KIND, 1.0, 4.0), (KIND, -1.0, 100.0)], 500)
    for _ in range(60):
        model.learn(1500.0)
    curves = model.classes.curves[[model.classes.known(KIND)]]
    for kind in (1.0, -1.0):
        far = model.net.chances(np.array([features(kind)]), curves)[0, bin_of(20_000.0) :]
        assert far.max() < 0.1


def test_what_people_did_long_ago_is_forgotten() -> None:
    model = ReturnModel(3)
    lived(model, [(KIND, 0.0, 2.0)], 300)
    for _ in range(20):
        model.learn(400.0)
    x = np.array([features(0.0)])
    before = model.tables([KIND], x)[0][0]
    lived(model, [(KIND, 0.0, float("inf"))], VISITS_MAX)
    for _ in range(20):
        model.learn(1e6)
    assert model.tables([KIND], x)[0][0] < before / 4
    untold = copy.deepcopy(model)
    model.returned(3, 2e6)  # of a visit whose place is taken
    model.answered(3, KIND, features(1.0), 2e6)
    for each in (model, untold):
        each.learn(2e6)
    assert model.learned() == untold.learned()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, N_BINS - 1), st.booleans())
def test_a_step_goes_down_the_likelihood(seed: int, last: int, returned: bool) -> None:
    """Its slopes against differences of the loss, written out for one visit."""
    rng = np.random.default_rng(seed)
    net = HazardNet(3, N_BINS)
    for weights in net.arrays.values():
        weights += rng.normal(0.0, 0.1, weights.shape)
    x, curve = rng.normal(size=(1, 3)), rng.uniform(0.01, 0.5, (1, N_BINS))

    def loss() -> float:
        chances = net.chances(x, curve)[0]
        total = -sum(np.log(1 - chances[b]) for b in range(last))
        total -= np.log(chances[last]) if returned else 0.0
        doubt = -(curve[0] * np.log(chances) + (1 - curve[0]) * np.log(1 - chances)).sum()
        return float(total + DOUBT * doubt)

    for name, slopes in net.slopes(x, curve, np.array([last]), np.array([returned])).items():
        at = tuple(int(rng.integers(0, n)) for n in slopes.shape)
        around = []
        for change in (1e-5, -2e-5):
            net.arrays[name][at] += change
            around.append(loss())
        net.arrays[name][at] += 1e-5
        assert slopes[at] == pytest.approx((around[0] - around[1]) / 2e-5, abs=1e-4)


def test_visits_follow_a_conversation() -> None:
    """Turn, gap, stop reason and what is new go from a visit to the one that continues it."""
    visits = Visits()
    for turn in range(3):
        visit = visits.begin(10.0 * turn)
        for key in range(turn + 1):
            visit.nbytes += 10
            visits.returned(key, 10.0 * turn)
        visits.set_end(turn)
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
    """The end was split: the conversation continues from its upper part."""
    policy = planted(Foresight)
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


def test_floods_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """New conversations and new stop reasons without end take no more memory."""
    monkeypatch.setattr("towerd.policy.visits.AWAY_MAX", 500)
    visits = Visits()
    for i in range(800):
        visits.begin(float(i)).nbytes += 1
        visits.set_end(i)
        visits.answered(i, i + 0.5, f"reason {i}")
    assert len(visits.away) == 500
    assert len(visits.stops) <= 8


def test_what_a_visit_takes() -> None:
    """Tens of thousands are remembered: each takes about a kilobyte, including its indices."""
    visits, n = Visits(), 2000
    for i in range(3 * n):
        if i == 2 * n:
            tracemalloc.start()
        visit = visits.begin(float(i))
        visit.nbytes += 1
        visits.set_end(i)
        visits.answered(i, i + 0.5, "end_turn")
        visits.index(visit, float(i))
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes < 1500 * n


def test_ended_conversations_go_first() -> None:
    """Even when they were used last; the base they share with others stays."""
    policy = planted(Foresight)
    policy.insert(1, 10, 0.0, None)
    policy.insert(2, 10, 0.0, 1)
    policy.insert(3, 10, 1.0, 1)
    policy.ended(3, 2.0)
    assert policy.victims(30, always) == [3, 2, 1]


def test_what_is_above_an_inner_end_goes_on() -> None:
    """An end from an inner key on does not change the ranks of its ancestors."""
    policy = planted(Foresight)
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
    policy = planted(Foresight)
    policy.insert(50, 10, 0.0, None)
    policy.insert(1, 10, 1.0, None)
    for i in range(2, 6):
        policy.access(1, float(i))
        policy.insert(i, 10, float(i), 1)
    for i in range(2, 6):
        policy.ended(i, 6.0)
    assert policy.victims(50, always) == [2, 3, 4, 5, 50]


def serve(policy: Any, path: list[int], now: float, room: int) -> int:
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
    assert fast_and_slow(planted(LRU)) == 0
    policy = planted(Foresight)
    assert fast_and_slow(policy) > 1000
    assert policy.trusts


def coming_back(policy: Foresight, first: int, n: int, soon: str, after_s: int) -> int:
    """Every second a conversation whose answer ends in `soon`, which comes back once after so many
    seconds, and two that end in another way and never do. Ends when the policy changes sides at the
    latest; the returns that were found."""
    hits, trusted, never = 0, policy.trusts, {"tool_use": "end_turn", "end_turn": "tool_use"}[soon]
    for i in range(n):
        now, key = float(first + i), 10 * (first + i)
        if i >= after_s:
            hits += serve(policy, [key - 10 * after_s], now, 6)
        for j, stop in enumerate((soon, never, never)):
            serve(policy, [key + j], now + 0.1 + 0.2 * j, 6)
            policy.answered(key + j, now + 0.2 + 0.2 * j, stop)
        if trusted and not policy.trusts:
            break
    return hits


def test_the_guard_changes_sides() -> None:
    """The real cache uses the strategy that hit more, and the shadow runs the other one within the
    room that the real one has: with more it would lead at once."""
    policy = planted(Foresight)
    for i in range(50):
        serve(policy, [i % 9], float(i), 6)
        assert not policy.trusts, "forecasts must earn trust"
    order = policy.victims(6, always)
    assert order == sorted(order, key=lambda key: policy.explain(key, 50.0)["used"])
    coming_back(policy, 100, 400, "tool_use", 3)
    assert policy.trusts
    assert coming_back(policy, 500, 400, "tool_use", 3) > 390, "it stays on the better side"
    for i in range(200):
        serve(policy, [10**8 + i % 9], 1000.0 + i, 6)
        assert policy.trusts, "LRU finds nothing here"
    assert coming_back(policy, 2000, 800, "end_turn", 1) < 100, "what was learned is wrong now"
    assert not policy.trusts
    policy.check_integrity()
