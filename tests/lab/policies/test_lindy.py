"""Lindy's preferences."""

from __future__ import annotations

from planted import planted

from lab.policies.lindy import BASE_BRANCHES, Lindy


def always(key: int) -> bool:
    return True


def test_lindy_age_earns_credit() -> None:
    """Of two keys used at nearly the same time the one with the longer past stays."""
    lindy = planted(Lindy)
    lindy.insert(1, 10, 0.0, None)
    lindy.insert(2, 10, 99.0, None)
    lindy.access(1, 100.0)
    lindy.access(2, 101.0)
    assert lindy.victims(10, always) == [2]
    lindy.access(2, 130.0)
    assert lindy.victims(10, always) == [1], "recency counts more than age"


def test_lindy_bases_go_last() -> None:
    """A key with many continuations stays, even after those have left."""
    lindy = planted(Lindy)
    lindy.insert(1, 10, 0.0, None)
    for i in range(BASE_BRANCHES):
        lindy.insert(10 + i, 10, 1.0 + i, 1)
    for i in range(BASE_BRANCHES):
        lindy.remove(10 + i)
    lindy.insert(2, 10, 50.0, None)
    assert lindy.victims(20, always) == [2, 1]


def test_lindy_one_continuation_that_comes_back_counts_once() -> None:
    """A conversation that is evicted and returns does not make a base."""
    lindy = planted(Lindy)
    lindy.insert(1, 10, 0.0, None)
    for now in range(10):
        lindy.insert(2, 10, 1.0 + now, 1)
        lindy.remove(2)
    lindy.insert(3, 10, 50.0, None)
    assert lindy.victims(20, always) == [1, 3]


def test_lindy_age_survives_eviction() -> None:
    """Accumulated age is the age of the conversation, not of its copy in this tier."""
    lindy = planted(Lindy)
    lindy.insert(1, 10, 0.0, None)
    lindy.remove(1)
    lindy.insert(1, 10, 100.0, None)
    lindy.insert(2, 10, 101.0, None)
    assert lindy.victims(10, always) == [2]
