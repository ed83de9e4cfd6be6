"""LRU against a brute-force model, and the factory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from planted import planted

from towerd.policy.base import LRU


def always(key: int) -> bool:
    return True


def test_least_recent_goes_first() -> None:
    """Plain LRU without a tree."""
    lru = planted(LRU)
    for key in (1, 2, 3):
        lru.insert(key, 10, float(key), None)
    lru.access(1, 4.0)
    assert lru.victims(20, always) == [2, 3]
    assert lru.victims(1000, always) == [2, 3, 1]
    assert lru.victims(0, always) == []
    assert len(lru) == 3, "asking changes nothing"


def test_a_parent_outlives_its_children() -> None:
    """An access to a leaf keeps its whole path, and ties go to the deeper."""
    lru = planted(LRU)
    lru.insert(1, 10, 0.0, None)
    lru.insert(2, 10, 1.0, 1)
    lru.insert(3, 10, 2.0, 2)
    lru.insert(4, 10, 3.0, 1)
    assert lru.victims(1000, always) == [3, 2, 4, 1]
    lru.access(3, 4.0)
    assert lru.victims(1000, always) == [4, 3, 2, 1]


def test_what_must_stay_keeps_its_parents() -> None:
    """A pinned or live node is skipped, and so are its ancestors."""
    lru = planted(LRU)
    lru.insert(1, 10, 0.0, None)
    lru.insert(2, 10, 1.0, 1)
    lru.insert(3, 10, 2.0, 2)
    lru.insert(4, 10, 3.0, 1)
    assert lru.victims(1000, lambda key: key != 3) == [4]


def test_insert_again_changes_size_and_place() -> None:
    """The total bytes are updated."""
    lru = planted(LRU)
    lru.insert(1, 10, 0.0, None)
    lru.insert(2, 5, 1.0, None)
    lru.insert(1, 7, 2.0, None)
    assert lru.nbytes == 12
    assert lru.victims(1, always) == [2]
    lru.remove(1)
    lru.remove(99)
    lru.access(99, 3.0)
    assert (lru.nbytes, len(lru), 1 in lru, 2 in lru) == (5, 1, False, True)


def test_split_moves_bytes_to_the_upper_part() -> None:
    """The upper part is the lower one's parent and counts as used."""
    lru = planted(LRU)
    lru.insert(1, 10, 0.0, None)
    lru.insert(2, 30, 1.0, 1)
    lru.insert(3, 10, 2.0, None)
    lru.split(2, 9, 12, 3.0)
    assert lru.nbytes == 50
    assert lru.victims(18, always) == [2]
    assert lru.victims(1000, always) == [2, 3, 9, 1]
    lru.split(77, 78, 1, 4.0)
    assert 78 not in lru


@st.composite
def events(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(["insert", "access", "remove", "split"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 9), st.integers(1, 50)), max_size=60))


@given(events=events(), blocked=st.sets(st.integers(0, 30)), wanted=st.integers(0, 300))
def test_random_events(events: list[tuple[str, int, int]], blocked: set[int], wanted: int) -> None:
    """Sums hold; no victim has a child that stays; enough is freed if it can be."""
    lru, sizes, parents = planted(LRU), dict[int, int](), dict[int, int | None]()
    fresh = 10
    for now, (kind, key, nbytes) in enumerate(events):
        if kind == "insert":
            parents.setdefault(key, key // 2 if key > 1 else None)
            sizes[key] = nbytes
            lru.insert(key, nbytes, now, parents[key])
        elif kind == "access":
            lru.access(key, now)
        elif kind == "remove":
            lru.remove(key)
            sizes.pop(key, None)
        elif sizes.get(key, 0) > 1:
            lru.split(key, fresh, 1, now)
            sizes[fresh], sizes[key] = 1, sizes[key] - 1
            parents[fresh], parents[key] = parents[key], fresh
            fresh += 1
    assert lru.nbytes == sum(sizes.values())
    assert len(lru) == len(sizes)
    victims = lru.victims(wanted, lambda key: key not in blocked)
    assert len(set(victims)) == len(victims)
    gone: set[int] = set()
    for victim in victims:
        assert victim not in blocked
        assert all(parents[key] != victim for key in sizes if key not in gone)
        gone.add(victim)
    freed = sum(sizes[key] for key in victims)
    possible = lru.victims(10**9, lambda key: key not in blocked)
    assert freed >= min(wanted, sum(sizes[key] for key in possible))
    if victims:
        assert freed - sizes[victims[-1]] < wanted
