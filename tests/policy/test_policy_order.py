"""Policies read the tree as it is, however late they hear of what changed it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product

import pytest
from planted import Planted, planted

from lab.policies.factory import NAMES, make_policy
from towerd.policy import Policy
from towerd.policy.foresight import Foresight

CALLS: dict[str, Callable[[Policy], object]] = {
    "access": lambda policy: policy.access(2, 5.0),
    "insert": lambda policy: policy.insert(4, 10, 5.0),
    "resize": lambda policy: policy.resize(2, 60),
    "answered": lambda policy: policy.answered(2, 5.0, "tool_use"),
    "stepped": lambda policy: policy.stepped(2, 5.0, "w", "a"),
    "ended": lambda policy: policy.ended(2, 5.0),
    "victims": lambda policy: policy.victims(10**6, lambda key: True),
    "explain": lambda policy: policy.explain(3, 5.0),
    "remove": lambda policy: policy.remove(2),
}


def cut_tree() -> Planted:
    """Key 2 was cut and 3 is its beginning, below 1; 4 is below 2."""
    tree = Planted()
    tree.above = {1: None, 3: 1, 2: 3, 4: 2}
    return tree


@pytest.mark.parametrize("name", NAMES)
def test_events_in_any_order(name: str) -> None:
    """The tree has long been cut when the keys and the cut are heard of; any event may follow."""
    for call in CALLS.values():
        for order in permutations((1, 2, 3, "split")):
            policy = make_policy(name, cut_tree())
            for now, event in enumerate(order):
                if isinstance(event, int):
                    policy.insert(event, 100, float(now))
                else:
                    policy.split(2, 3, 50, float(now))
            policy.check_integrity()
            call(policy)
            policy.check_integrity()
            gone = policy.victims(10**6, lambda key: True)
            assert len(gone) == len(policy)
            assert [key for key in gone if key != 4][-2:] == [3, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_that_is_not_heard_of_yet(name: str) -> None:
    """The key above the cut is no leaf meanwhile, and is one as soon as the rest is gone."""
    for is_late, call in product((False, True), CALLS.values()):
        tree = cut_tree()
        tree.above = {1: None, 2: 1}
        policy = make_policy(name, tree)
        policy.insert(1, 100, 0.0)
        policy.insert(2, 100, 1.0)
        tree.above = cut_tree().above
        call(policy)
        if is_late:
            policy.split(2, 3, 50, float("-inf"))
        for key in (4, 2, 3):
            policy.remove(key)
        if not is_late:
            policy.split(2, 3, 50, float("-inf"))
        policy.check_integrity({1: 100})
        assert policy.victims(1, lambda key: True) == [1]


@pytest.mark.parametrize("name", NAMES)
def test_a_split_in_its_place(name: str) -> None:
    """The two parts have the bytes of the whole and stand where it stood. The upper one is used if
    the split comes with a time of its own."""
    policy = planted(lambda tree: make_policy(name, tree))
    policy.insert(1, 100, 0.0, None)
    policy.insert(2, 100, 1.0, 1)
    policy.split(2, 3, 50, 2.0)
    policy.check_integrity({1: 100, 3: 50, 2: 50})
    policy.split(2, 5, 20, float("-inf"))
    policy.check_integrity({1: 100, 3: 50, 5: 20, 2: 30})
    assert [policy.explain(key, 9.0)["used"] for key in (2, 5, 3)] == [1.0, 1.0, 2.0]
    assert policy.victims(10**6, lambda key: True) == [2, 5, 3, 1]


def test_what_is_given_up_is_split_all_the_same() -> None:
    """The shadow still has the key: its sizes are updated, and a return is a hit."""
    tree = Planted()
    policy = Foresight(tree)
    tree.above = {1: None, 2: 1, 9: None}
    policy.insert(1, 100, 0.0)
    policy.insert(2, 100, 10.0)
    policy.insert(9, 10, 20.0)
    assert policy.victims(1, lambda key: key == 2) == [2]
    policy.remove(2)
    tree.cut(2, 3)
    policy.split(2, 3, 90, float("-inf"))
    policy.check_integrity({1: 100, 9: 10})
    tree.above[4] = 3
    policy.insert(3, 90, 30.0)
    policy.insert(4, 50, 30.0)
    policy.check_integrity({1: 100, 3: 90, 4: 50, 9: 10})
    assert policy.visits.current.turn == 2
    policy.access(4, 40.0)
    assert policy.trusts, "the shadow found 3, which was evicted here"


@pytest.mark.parametrize("split_s", [20.0, float("-inf")])
def test_a_tip_that_is_split_at_once(split_s: float) -> None:
    """The next request continues the very last one."""
    policy = planted(Foresight)
    policy.insert(1, 100, 0.0, None)
    policy.split(1, 3, 90, split_s)
    policy.insert(4, 50, 20.0, 3)
    policy.access(3, 20.0)
    assert policy.visits.current.turn == 1
    policy.check_integrity()
