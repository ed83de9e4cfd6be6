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

    def run(self, base: int, nbytes: int = 10) -> int:
        """A workflow that begins, takes its step and is over; the key of its own."""
        self.n += 1
        self.now += 1.0
        self.policy.insert(base, nbytes, self.now, None)
        self.policy.insert(self.n, nbytes, self.now, base)
        self.policy.stepped(self.n, self.now, f"w{self.n}", f"agent {base}", base)
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
    policy.insert(7, 10, agents.now + 0.1, None)
    assert policy.n_workflows(1) == 2
    assert policy.n_workflows(own) == 1
    assert agents.evicted(2) == [own, 7], "the base comes after a chat that was used later"


def test_a_split_of_evicted_rows_keeps_what_is_known() -> None:
    policy = planted(Foresight)
    agents = Agents(policy)
    own = agents.run(base=1)
    agents.evicted(2)
    policy.split(own, 50, 4, agents.now)
    assert policy.n_workflows(50) == policy.n_workflows(own) == 1
    policy.forget(50)
    assert policy.n_workflows(50) == 0


def test_bases_stay_while_they_pay() -> None:
    """They stay however long they are idle, unless most are used once, or they take too much."""
    policy = planted(Foresight)
    agents = Agents(policy)
    for base in (1, 2, 1, 2, 3):
        agents.run(base)
    for _ in range(40):
        agents.run(base=1)
        agents.evicted(1)
    assert {1, 2, 3} <= {key for key in (1, 2, 3) if key in policy}
    assert policy.keeps_bases
    for base in range(10, 14):
        agents.run(base)
    agents.evicted(1)
    assert not policy.keeps_bases, "most were used by one workflow"
    for base in range(10, 14):
        agents.run(base)
    policy.resize(2, 10_000)
    agents.evicted(1)
    assert not policy.keeps_bases, "they take more than half"
