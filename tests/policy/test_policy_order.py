"""Events in impossible orders: there is never a cycle, and every call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.factory import NAMES, make_policy
from towerd.policy import Policy
from towerd.policy.foresight import Foresight

CALLS: dict[str, Callable[[Policy], object]] = {
    "access": lambda policy: policy.access(2, 5.0),
    "insert": lambda policy: policy.insert(4, 10, 5.0, 2),
    "resize": lambda policy: policy.resize(2, 60),
    "answered": lambda policy: policy.answered(2, 5.0, "tool_use"),
    "stepped": lambda policy: policy.stepped(2, 5.0, "w", "a"),
    "ended": lambda policy: policy.ended(2, 5.0),
    "victims": lambda policy: policy.victims(10**6, lambda key: True),
    "explain": lambda policy: policy.explain(3, 5.0),
    "remove": lambda policy: policy.remove(2),
}


def told(policy: Policy, events: Sequence[str]) -> None:
    """Key 2 was cut and 3 is its beginning, below 1. Besides the split, each event inserts a key
    with the parent that it has after the cut; `2 whole` with the one before."""
    parents = {"1": None, "2": 3, "3": 1, "2 whole": 1}
    for now, event in enumerate(events):
        if event == "split":
            policy.split(2, 3, 50, float(now))
        else:
            policy.insert(int(event[0]), 100, float(now), parents[event])


@pytest.mark.parametrize("name", NAMES)
def test_a_late_split_makes_no_circle(name: str) -> None:
    """With any event before the late split, and any after it."""
    for lower, call in product(("2", "2 whole"), CALLS.values()):
        for order in permutations(("1", lower, "3", "split")):
            policy = make_policy(name)
            told(policy, order)
            policy.check_integrity()
            call(policy)
            policy.check_integrity()
            assert len(policy.victims(10**6, lambda key: True)) == len(policy)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_came_before_its_split(name: str) -> None:
    """The lower part already has its new parent: the upper part must not become its own parent."""
    policy = make_policy(name)
    told(policy, ("1", "2", "split"))
    policy.check_integrity({1: (None, 100), 2: (3, 50), 3: (None, 50)})
    policy.access(2, 3.0)
    gone = policy.victims(10**6, lambda key: True)
    assert gone.index(2) < gone.index(3)


@pytest.mark.parametrize("name", NAMES)
def test_a_split_in_its_place(name: str) -> None:
    """The two parts have the bytes of the whole and stand where it stood. The upper one is used if
    the split comes with a time of its own."""
    policy = make_policy(name)
    told(policy, ("1", "2 whole", "split"))
    policy.check_integrity({1: (None, 100), 3: (1, 50), 2: (3, 50)})
    policy.split(2, 5, 20, float("-inf"))
    policy.check_integrity({1: (None, 100), 3: (1, 50), 5: (3, 20), 2: (5, 30)})
    assert [policy.explain(key, 9.0)["used"] for key in (2, 5, 3)] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_structure(name: str, data: st.DataObject) -> None:
    """Random parents and splits, including cycles."""
    policy, keys = make_policy(name), st.integers(0, 5)
    for now in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["insert", "split", "access", "remove", "answered"]))
        key, other = data.draw(keys), data.draw(keys)
        if kind == "insert":
            policy.insert(key, 10, float(now), other)
        elif kind == "split":
            policy.split(key, other, data.draw(st.integers(0, 20)), float(now))
        elif kind == "access":
            policy.access(key, float(now))
        elif kind == "remove":
            policy.remove(key)
        else:
            policy.answered(key, float(now), "end_turn")
        policy.check_integrity()
    assert len(policy.victims(10**6, lambda key: True)) == len(policy)


def test_what_is_given_up_is_split_all_the_same() -> None:
    """The shadow still has the key: its sizes and its tree are updated, and a return is a hit."""
    policy = Foresight()
    policy.insert(1, 100, 0.0, None)
    policy.insert(2, 100, 10.0, 1)
    policy.insert(9, 10, 20.0, None)
    assert policy.victims(1, lambda key: key == 2) == [2]
    policy.remove(2)
    policy.split(2, 3, 90, float("-inf"))
    policy.check_integrity({1: (None, 100), 9: (None, 10)})
    for key, nbytes, parent in ((3, 90, 1), (4, 50, 3)):
        policy.insert(key, nbytes, 30.0, parent)
    policy.check_integrity({1: (None, 100), 3: (1, 90), 4: (3, 50), 9: (None, 10)})
    assert policy.visits.current.turn == 2
    policy.access(4, 40.0)
    assert policy.trusts, "the shadow found 3, which was evicted here"


@pytest.mark.parametrize("split_s", [20.0, float("-inf")])
def test_a_tip_that_is_split_at_once(split_s: float) -> None:
    """The next request continues the very last one."""
    policy = Foresight()
    policy.insert(1, 100, 0.0, None)
    policy.split(1, 3, 90, split_s)
    policy.insert(4, 50, 20.0, 3)
    policy.access(3, 20.0)
    assert policy.visits.current.turn == 1
    policy.check_integrity()
