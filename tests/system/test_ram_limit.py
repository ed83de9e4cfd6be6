"""A limit on RAM: what counts, what gives way and when, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import psutil
from waiting import until

from towerd.system.machine import children_bytes, own_resident_bytes
from towerd.system.ram_limit import NO_LIMIT, RamLimit

MIB = 1 << 20


class Memory:
    """A process that takes what it is told."""

    def __init__(self, own: int = 0) -> None:
        self.own = own

    def limit(self, bytes_max: int = 100 * MIB) -> RamLimit:
        return RamLimit(bytes_max, own=lambda: self.own, children=lambda: 0, address_max=0)


def test_no_limit() -> None:
    ram = RamLimit(0, address_max=0)
    assert not ram.is_limited
    assert ram.has_room(1 << 60)
    assert ram.claim(1 << 60)
    assert not ram.is_pressed
    assert ram.left() == ram.room == NO_LIMIT
    assert ram.stats()["ram_bytes_max"] is None


def test_what_the_process_and_its_children_take() -> None:
    """As psutil counts it."""
    own = psutil.Process()
    found = own_resident_bytes()
    assert found is not None
    assert abs(found - own.memory_info().rss) < 8 * MIB
    program = "import sys; x = b'x' * (64 << 20); print(1, flush=True); sys.stdin.read()"
    before = children_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        until(lambda: children_bytes() > before)
        assert 64 * MIB < children_bytes() - before < 96 * MIB
        child.communicate()
    assert children_bytes() == before


def test_claims_count_until_they_are_released() -> None:
    memory = Memory(50 * MIB)
    ram = memory.limit()
    assert ram.claim(40 * MIB)
    assert not ram.claim(10 * MIB), "97 % of 100, less 50, less 40"
    ram.release(40 * MIB)
    assert ram.claim(10 * MIB)


def test_of_what_is_taken_in_turn_the_most_counts() -> None:
    """Also while some of it is released."""
    memory = Memory(50 * MIB)
    ram = memory.limit()
    assert ram.claim(5 * MIB, in_turn=20 * MIB)
    assert ram.claim(5 * MIB, in_turn=30 * MIB)
    assert ram.claim(5 * MIB, in_turn=20 * MIB)
    assert not ram.claim(0, in_turn=33 * MIB), "97 % of 100, less 50, less 15"
    assert not ram.has_room(3 * MIB)
    ram.release(5 * MIB, in_turn=30 * MIB)
    assert ram.has_room(16 * MIB)
    ram.release(10 * MIB, in_turn=20 * MIB)
    assert not ram.has_room(28 * MIB)
    ram.release(0, in_turn=20 * MIB)
    assert ram.has_room(46 * MIB)


def test_what_a_context_will_take_is_not_given_away() -> None:
    """As its cells are used, they count as taken instead."""
    memory, untouched = Memory(30 * MIB), [40 * MIB]
    ram = memory.limit()
    ram.leave_room(22 * MIB, lambda: untouched[0])
    assert ram.has_room(26 * MIB)
    assert not ram.has_room(28 * MIB)
    ram.take_back()
    assert ram.has_room(60 * MIB)


def test_givers_are_asked_in_order_and_no_more_than_needed() -> None:
    memory = Memory(96 * MIB)
    ram = memory.limit()
    asked: list[str] = []

    def give(name: str, n_mib: int) -> None:
        asked.append(name)
        memory.own -= n_mib * MIB

    ram.gives_way(lambda: give("first", 5))
    ram.gives_way(lambda: give("second", 20))
    third = partial(give, "third", 20)
    ram.gives_way(third)
    assert ram.make_room(15 * MIB)
    assert asked == ["first", "second"]
    assert not ram.make_room(90 * MIB)
    assert asked[2:] == ["first", "second", "third"]
    ram.keeps(third)
    assert not ram.make_room(99 * MIB)
    assert asked[5:] == ["first", "second"]


def test_a_giver_that_fails_keeps_no_other_from_giving() -> None:
    memory = Memory(99 * MIB)
    ram = memory.limit()

    def fail() -> None:
        raise OSError("broken")

    def give() -> None:
        memory.own = 10 * MIB

    ram.gives_way(fail)
    ram.gives_way(give)
    assert ram.make_room(50 * MIB)


def test_the_thread_gives_way_before_the_limit() -> None:
    """From 92 % on, without anyone asking."""
    memory, given = Memory(50 * MIB), threading.Event()
    ram = memory.limit()

    def give() -> None:
        memory.own = 60 * MIB
        given.set()

    ram.gives_way(give)
    ram.start()
    memory.own = 93 * MIB
    assert given.wait(30)
    ram.close()
    assert ram.peak == 93 * MIB


def test_the_address_space_counts() -> None:
    ram = RamLimit(0, address_max=1 << 50)
    assert ram.is_limited
    assert ram.has_room(1 << 40)
    assert not ram.has_room(1 << 50)


def test_the_thread_survives_an_error() -> None:
    """What cannot be read once is read again."""
    looked: list[int] = []

    def own() -> int:
        looked.append(1)
        if len(looked) == 1:
            raise OSError("gone")
        return 95

    gave = threading.Event()
    ram = RamLimit(100, own=own, children=lambda: 0, address_max=0)
    ram.gives_way(gave.set)
    ram.start()
    assert gave.wait(60)
    ram.close()
