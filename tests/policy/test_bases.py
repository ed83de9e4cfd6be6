"""What agents' prompts begin with stays, though no workflow runs that uses it."""

from __future__ import annotations

from typing import Any

import pytest
from planted import planted

from towerd.policy.base import Policy
from towerd.policy.foresight import Foresight
from towerd.policy.pbkv import PBKV


def always(_: int) -> bool:
    return True


class Agents:
    """Workflows of one step each: below the base of its agent stands what a workflow has for itself."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.now, self.n = policy, 0.0, 100

    def run(self, base: int, nbytes: int = 10, tenant: str = "a") -> int:
        """A workflow that begins, takes its step and is over; the key of its own."""
        self.n += 1
        self.now += 1.0
        self.policy.insert(base, nbytes, self.now, None)
        self.policy.insert(self.n, 10, self.now, base)
        self.policy.stepped(self.n, self.now, f"w{self.n}", f"{tenant}\nagent {base}", base)
        self.policy.workflow_ended(f"w{self.n}", self.now)
        return self.n

    def evicted(self, n: int) -> list[int]:
        """The keys that leave for `n` of ten bytes."""
        left: list[int] = self.policy.victims(10 * n, always)
        for key in left:
            self.policy.remove(key)
        return left


@pytest.mark.parametrize("make", [PBKV, Foresight])
def test_what_only_a_workflow_had_leaves_before_the_base_of_its_agent(make: type[Policy]) -> None:
    agents = Agents(planted(make))
    own = [agents.run(base=1) for _ in range(3)]
    assert sorted(agents.evicted(3)) == own
    assert 1 in agents.policy
    assert not agents.policy.is_retired(1)


def test_uses_of_rows_that_left_and_came_back_count() -> None:
    """One of the two workflows used the rows before they were evicted."""
    policy = planted(Foresight)
    agents = Agents(policy)
    agents.run(base=1)
    assert len(agents.evicted(2)) == 2
    own = agents.run(base=1)
    for chat in range(1000, 1020):
        policy.insert(chat, 10, agents.now + 0.1, None)
    assert policy.n_workflows(1) == 2
    assert policy.n_workflows(own) == 1
    assert stay(policy, 1) == [True], "after chats that were used later"


def test_a_split_of_evicted_rows_keeps_what_is_known() -> None:
    policy = planted(Foresight)
    agents = Agents(policy)
    agents.run(base=1)
    agents.evicted(2)
    policy.split(1, 50, 4, agents.now)
    assert policy.n_workflows(50) == policy.n_workflows(1) == 1
    policy.forget(50)
    assert policy.n_workflows(50) == 0


def stay(policy: Any, *keys: int) -> list[bool]:
    """Whether each leaves after everything from key 100 on, which is what workflows and chats have for
    themselves."""
    policy.victims(0, always)
    order = policy.lowest(policy.nbytes, always)
    n_private = max(at for at, key in enumerate(order) if key >= 100)
    return [order.index(key) > n_private for key in keys]


def test_bases_of_several_workflows_stay_if_they_fit() -> None:
    """Whatever other bases were used once; one that is too large stays no longer than others."""
    policy = planted(Foresight)
    agents = Agents(policy)
    for base in (1, 2, 1, 2, *range(1000, 1100)):
        agents.run(base)
    assert stay(policy, 1, 2) == [True, True]
    policy.resize(2, 100_000)
    assert stay(policy, 1, 2) == [True, False]


@pytest.mark.parametrize(("n_turnovers", "stays"), [(5, True), (12, False)])
def test_a_base_stays_for_some_turnovers_of_the_tier(n_turnovers: int, stays: bool) -> None:
    """It leaves like any rows if it is used more seldom than other chats replace what is there."""
    policy = planted(Foresight)
    agents = Agents(policy)
    for _ in range(2):
        agents.run(base=1)
    for _ in range(100 * n_turnovers):
        agents.n, agents.now = agents.n + 1, agents.now + 1.0
        policy.insert(agents.n, 10, agents.now, None)
        if policy.nbytes > 1000:
            agents.evicted(1)
    assert (1 in policy and stay(policy, 1) == [True]) is stays


def test_a_tenant_with_too_many_bases_loses_its_own_only() -> None:
    policy = planted(Foresight)
    agents = Agents(policy)
    for _ in range(2):
        agents.run(base=1, tenant="small")
        for base in range(10, 60):
            agents.run(base, nbytes=1000 if base < 20 else 10, tenant="large")
    policy.insert(1000, 10, agents.now + 0.1, None)
    kept = stay(policy, *range(10, 60))
    assert 1 <= sum(kept[:10]) <= 6, "all of these would take most of the tier"
    assert all(kept[10:]), "more of these fit"
    assert stay(policy, 1) == [True]


def test_bases_that_are_never_used_again_are_retired() -> None:
    """Of a tenant whose system prompts have the time in them."""
    policy = planted(Foresight)
    agents = Agents(policy)
    agents.run(base=10)
    policy.insert(1000, 10, 5.0, None)
    policy.victims(10, always)
    assert not policy.is_retired(10), "nothing is known of the first"
    for base in range(11, 30):
        agents.run(base)
    policy.victims(10, always)
    assert policy.is_retired(10)
    for base in range(10, 30):
        agents.run(base)
    agents.run(base=30)
    policy.victims(10, always)
    assert not policy.is_retired(30), "most were used again, so this one may be, too"


def test_what_is_known_is_bounded_by_the_tier() -> None:
    """A client that names all of its work alike uses ever new rows."""
    policy = planted(Foresight)
    for key in range(1, 400):
        policy.insert(key, 10, float(key), None)
        policy.stepped(key, float(key), "always", "a\nagent")
        for left in policy.victims(policy.nbytes - 200, always):
            policy.remove(left)
    assert len(policy.users) <= 20
    assert len(policy.runs["always"].keys) <= 20
