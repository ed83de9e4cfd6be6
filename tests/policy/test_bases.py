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
        self.policy.insert(self.n, nbytes, self.now, base)
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
    order = policy.victims(policy.nbytes, always)
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


def test_a_base_that_is_idle_for_too_long_leaves_like_any_rows() -> None:
    """Eight of its mean intervals are too long, but two minutes are not."""
    policy = planted(Foresight)
    agents = Agents(policy)
    agents.run(base=1)
    agents.now += 60.0
    agents.run(base=1)
    for idle_s, stays in ((100.0, True), (7 * 60.0, True), (9 * 60.0, False)):
        for n in range(20):
            policy.insert(int(1000 * idle_s) + n, 10, agents.now + idle_s, None)
        assert stay(policy, 1) == [stays], idle_s


def test_a_tenant_with_too_many_bases_loses_its_own_only() -> None:
    policy = planted(Foresight)
    agents = Agents(policy)
    for _ in range(2):
        agents.run(base=1, tenant="small")
        for base in range(10, 60):
            agents.run(base, tenant="large")
    policy.insert(1000, 10, agents.now + 0.1, None)
    assert stay(policy, 1) == [True]
    assert 5 <= sum(stay(policy, *range(10, 60))) <= 15, (
        "of what takes a hundredth of the tier each"
    )


def test_what_is_known_is_bounded_by_the_tier() -> None:
    """A client that names all of its work alike uses ever new rows."""
    policy = planted(Foresight)
    for key in range(1, 2000):
        policy.insert(key, 10, float(key), None)
        policy.stepped(key, float(key), "always", "a\nagent")
        for left in policy.victims(policy.nbytes - 200, always):
            policy.remove(left)
    assert len(policy.users) <= 20
    assert len(policy.runs["always"].keys) <= 20
