"""The keys that policies expect to be used again: soonest first, none that are over."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from planted import planted

from lab.policies.lindy import Lindy
from towerd.policy.base import LRU, ReuseForecaster
from towerd.policy.foresight import Foresight
from towerd.policy.pbkv import PBKV


def a_day(policy: Any) -> float:
    """Tools return in seconds, people in minutes: two hundred of each, so that it is learned."""
    now = 0.0
    for key in range(0, 800, 4):
        for start, gap_s, stop in ((key, 2.0, "tool_use"), (key + 2, 200.0, "end_turn")):
            policy.insert(start, 10, now, None)
            policy.answered(start, now + 0.5, stop)
            now += gap_s
            policy.insert(start + 1, 10, now, start)
            policy.ended(start + 1, now + 0.5)
            now += 1.0
    return now


def test_the_soonest_first() -> None:
    policy = planted(Foresight)
    now = a_day(policy)
    policy.trusts = True
    policy.insert(5001, 10, now, None)
    policy.answered(5001, now + 0.1, "end_turn")
    policy.insert(5002, 10, now + 1.0, None)
    policy.answered(5002, now + 1.1, "tool_use")
    policy.insert(5003, 10, now + 1.2, None)
    policy.answered(5003, now + 1.3, "tool_use")
    policy.ended(5003, now + 1.4)
    policy.insert(5004, 10, now + 1.5, None)
    policy.remove(5002)
    before = [policy.explain(key, now + 1.6) for key in (5001, 5004)]
    found = policy.wanted(now + 1.6, 10)
    assert [key for key, _ in found if key > 5000 and key != 5004] == [5002, 5001]
    assert found[0][0] == 5002
    assert policy.wanted(now + 1.6, 1) == found[:1]
    assert all(a[1] >= b[1] > 0.0 for a, b in pairwise(found))
    assert [policy.explain(key, now + 1.6) for key in (5001, 5004)] == before


def test_nothing_while_forecasts_are_not_trusted() -> None:
    policy = planted(Foresight)
    now = a_day(policy)
    policy.trusts = False
    assert policy.wanted(now, 10) == []
    assert planted(Foresight).wanted(0.0, 10) == []


def test_which_policies_forecast_reuse() -> None:
    assert isinstance(planted(Foresight), ReuseForecaster)
    assert not isinstance(planted(LRU), ReuseForecaster)
    assert isinstance(planted(PBKV), ReuseForecaster)
    assert isinstance(planted(Lindy), ReuseForecaster)


def test_lindy_wants_what_has_lived_longer_than_it_is_idle() -> None:
    """By its end, evicted or not, and from where the next prompt parts; one visit is no life."""
    policy = planted(Lindy)
    policy.insert(1, 100, 0.0, None)  # what all begin with
    policy.insert(10, 10, 1.0, 1)
    policy.insert(20, 10, 2.0, 1)
    policy.insert(11, 10, 101.0, 10)
    policy.split(11, 12, 8, float("-inf"))
    policy.insert(13, 10, 111.0, 12)
    policy.insert(21, 10, 152.0, 20)
    policy.insert(30, 10, 152.5, 1)
    policy.remove(13)
    assert [key for key, _ in policy.wanted(153.0, 5)] == [21, 13]
    assert [key for key, _ in policy.wanted(153.0, 1)] == [21]
    assert [key for key, _ in policy.wanted(223.0, 5)] == [21]
    assert policy.wanted(500.0, 5) == []


def test_pbkv_wants_the_prompts_of_the_next_agents() -> None:
    """Equation 1: the probability that the agent is next, over all workflows."""
    policy = planted(PBKV)
    for now in range(20):
        policy.insert(1, 10, 3.0 * now, None)
        policy.stepped(1, 3.0 * now, "w", "plan")
        policy.insert(2, 10, 3.0 * now + 1, None)
        policy.stepped(2, 3.0 * now + 1, "w", "code")
    (first, chance), *rest = policy.wanted(60.0, 5)
    assert first == 1
    assert 0.8 < chance <= 1.0
    assert all(key == 2 and value < 0.2 for key, value in rest)
    policy.workflow_ended("w", 61.0)
    assert policy.wanted(62.0, 5) == []
