"""Requirements of every policy: sums, the tree, enough victims, no side effects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import Planted, planted

from lab.policies.factory import NAMES, make_policy

KINDS = [
    "insert",
    "access",
    "remove",
    "split",
    "evict",
    "answered",
    "ended",
    "back",
    "resize",
    "stepped",
    "workflow_ended",
]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    one = st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 50))
    return draw(st.lists(one, max_size=60))


class Model:
    """A model of one policy's keys."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.sizes: dict[int, int] = {}
        self.parents: dict[int, int | None] = {}
        self.now = 0.0
        self._fresh = 10

    def play(self, kind: str, key: int, nbytes: int) -> None:
        """One event, to the policy and to the model."""
        self.now += 1.0 if kind != "back" else -3.0
        if kind == "insert":
            self.parents.setdefault(key, key // 2 if key > 1 else None)
            self.sizes[key] = nbytes
            self.policy.insert(key, nbytes, self.now, self.parents[key])
        elif kind == "access":
            self.policy.access(key, self.now)
        elif kind == "remove":
            self._remove(key)
        elif kind == "evict":
            for victim in self.policy.victims(nbytes, lambda key: True):
                self._remove(victim)
        elif kind == "answered":
            self.policy.answered(key, self.now, "tool_use" if nbytes % 2 else "end_turn")
        elif kind == "ended":
            self.policy.ended(key, self.now)
        elif kind == "resize":
            self.policy.resize(key, nbytes)
            self.sizes |= {key: nbytes} if key in self.sizes else {}
        elif kind == "stepped":
            self.policy.stepped(key, self.now, f"w{nbytes % 3}", f"a{nbytes % 4}")
        elif kind == "workflow_ended":
            self.policy.workflow_ended(f"w{nbytes % 3}", self.now)
        elif kind == "split" and self.sizes.get(key, 0) > 1:
            self.policy.split(key, self._fresh, 1, self.now)
            self.sizes[self._fresh], self.sizes[key] = 1, self.sizes[key] - 1
            self.parents[self._fresh], self.parents[key] = self.parents[key], self._fresh
            self._fresh += 1

    def _remove(self, key: int) -> None:
        self.policy.remove(key)
        self.sizes.pop(key, None)


@pytest.mark.parametrize("name", NAMES)
@given(history=histories(), blocked=st.sets(st.integers(0, 30)), wanted=st.integers(0, 300))
def test_any_history(
    name: str, history: list[tuple[str, int, int]], blocked: set[int], wanted: int
) -> None:
    """After any events: sums hold, no victim has a child that stays, enough is freed if it can
    be and no more than that, and asking twice gives the same answer."""
    model = Model(planted(lambda tree: make_policy(name, tree)))
    policy, sizes, parents = model.policy, model.sizes, model.parents
    for kind, key, nbytes in history:
        model.play(kind, key, nbytes)
        assert policy.nbytes == sum(sizes.values())
        assert len(policy) == len(sizes)
        policy.check_integrity(sizes)
    assert all(key in policy for key in sizes)
    victims = policy.victims(wanted, lambda key: key not in blocked)
    assert victims == policy.victims(wanted, lambda key: key not in blocked)
    gone: set[int] = set()
    for victim in victims:
        assert victim not in blocked
        assert victim in sizes
        assert victim not in gone
        assert all(parents[key] != victim for key in sizes if key not in gone)
        gone.add(victim)
    possible = policy.victims(10**9, lambda key: key not in blocked)
    assert set(possible) == _removable(sizes, parents, blocked)
    freed = sum(sizes[key] for key in victims)
    assert freed >= min(wanted, sum(sizes[key] for key in possible))
    if victims:
        assert freed - sizes[victims[-1]] < wanted


def _removable(
    sizes: dict[int, int], parents: dict[int, int | None], blocked: set[int]
) -> set[int]:
    """Everything except what is blocked and its ancestors."""
    stays: set[int] = set()
    for key in sizes:
        at: int | None = key
        if key in blocked:
            while at is not None and at in sizes and at not in stays:
                stays.add(at)
                at = parents[at]
    return set(sizes) - stays


@pytest.mark.parametrize("name", NAMES)
def test_a_child_may_come_before_its_parent(name: str) -> None:
    """The tier may get the lower part of a path first."""
    tree = Planted()
    tree.above = {1: None, 2: 1, 3: 2}
    policy = make_policy(name, tree)
    for now, key in enumerate((2, 3, 1)):
        policy.insert(key, 10, float(now))
    assert policy.victims(30, lambda key: True) == [3, 2, 1]


@pytest.mark.parametrize("name", NAMES)
def test_unknown_keys_are_ignored(name: str) -> None:
    policy = planted(lambda tree: make_policy(name, tree))
    policy.access(7, 0.0)
    policy.remove(7)
    policy.split(7, 8, 1, 0.0)
    policy.answered(7, 0.0, "tool_use")
    policy.ended(7, 0.0)
    assert len(policy) == 0
    assert policy.nbytes == 0
    assert policy.victims(10, lambda key: True) == []


@pytest.mark.parametrize("name", NAMES)
def test_explains_the_order(name: str) -> None:
    """`place` is the order in which single leaves are evicted; None for an inner key."""
    policy = planted(lambda tree: make_policy(name, tree))
    for key in range(1, 6):
        policy.insert(key, 10, float(key), 1 if key > 1 else None)
    policy.access(3, 9.0)
    places = {key: policy.explain(key, 10.0)["place"] for key in range(1, 6)}
    assert places.pop(1) is None
    assert sorted(places.values()) == [0, 1, 2, 3]
    if name != "sieve":  # whose hand spares used keys and moves on
        assert policy.victims(1, lambda key: True) == [min(places, key=lambda key: places[key])]
    assert policy.explain(77, 10.0) == {}
