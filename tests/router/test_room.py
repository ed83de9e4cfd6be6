"""Who must leave so that another model can be loaded."""

from __future__ import annotations

import pytest

from towerd.router.loading.room import Occupant, Room, Verdict

ROOM = Room(memory_bytes=10, models_max=3)
FITS, WAITS, NEVER = Verdict(fits=True), Verdict(), Verdict(never=True)


def a(name: str, need: int, used: float, **more: bool) -> Occupant:
    return Occupant(name, need, used, **more)


@pytest.mark.parametrize(
    ("need", "occupants", "verdict"),
    [
        (4, [], FITS),
        (99, [], FITS),  # alone it always fits
        (4, [a("x", 6, 1)], FITS),
        (5, [a("x", 6, 1)], Verdict(stop=("x",))),
        (99, [a("x", 1, 1)], Verdict(stop=("x",))),
        # the same file under another name, however much room there is, and no other
        (1, [a("x", 1, 1), a("y", 1, 2, is_twin=True)], Verdict(stop=("y",))),
        (1, [a("x", 1, 2, is_twin=True, is_busy=True)], WAITS),
        (1, [a("x", 1, 2, is_twin=True, is_leaving=True)], WAITS),
        (1, [a("x", 1, 2, is_twin=True, keep=True)], NEVER),
        # the least recently used one
        (5, [a("x", 3, 2), a("y", 3, 1)], Verdict(stop=("y",))),
        # not the oldest if it is busy or kept
        (5, [a("x", 3, 2), a("y", 3, 1, is_busy=True)], Verdict(stop=("x",))),
        (5, [a("x", 3, 2), a("y", 3, 1, keep=True)], Verdict(stop=("x",))),
        # several, if one is not enough; none that need not
        (9, [a("x", 3, 1), a("y", 3, 2)], Verdict(stop=("x", "y"))),
        (5, [a("small", 1, 1), a("big", 6, 2)], Verdict(stop=("big",))),
        # nobody leaves before a busy one ends if that is what it takes
        (9, [a("x", 3, 1), a("y", 3, 2, is_busy=True)], WAITS),
        (5, [a("x", 6, 1, is_busy=True)], WAITS),
        # what is leaving has not left yet
        (5, [a("x", 6, 1, is_leaving=True)], WAITS),
        (5, [a("x", 6, 1, is_leaving=True), a("y", 4, 2)], WAITS),
        (7, [a("x", 6, 1, is_leaving=True), a("y", 4, 2)], Verdict(stop=("y",))),
        (5, [a("x", 6, 1, keep=True)], NEVER),
        # the number of models counts by itself
        (1, [a("x", 1, 3), a("y", 1, 1), a("z", 1, 2)], Verdict(stop=("y",))),
    ],
)
def test_who_leaves(need: int, occupants: list[Occupant], verdict: Verdict) -> None:
    assert ROOM.verdict(need, occupants) == verdict


def test_no_limit_on_their_number() -> None:
    room = Room(memory_bytes=10, models_max=0)
    assert room.verdict(1, [a(str(i), 1, i) for i in range(9)]).fits
