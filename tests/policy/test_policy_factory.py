"""Choosing a policy by name."""

from __future__ import annotations

import pytest
from planted import Planted

from towerd.errors import ConfigError
from towerd.policy import NAMES, Policy, make_policy


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_a_policy(name: str) -> None:
    """Each is fresh and implements the protocol."""
    policy: Policy = make_policy(name, Planted())
    assert policy is not make_policy(name, Planted())
    policy.insert(1, 10, 0.0)
    assert policy.victims(1, lambda key: True) == [1]


@pytest.mark.parametrize("name", ["fifo", "sieve"])
def test_unknown_name(name: str) -> None:
    """The message lists the policies, without those of the laboratory."""
    wanted = f"'{name}'; choose one of: foresight, lru, pbkv$"
    with pytest.raises(ConfigError, match=wanted):
        make_policy(name, Planted())
